package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/pires/go-proxyproto"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// annotated is a service's manifest with annotations.
func (s webService) annotated(annotations string) string {
	return strings.Replace(s.yaml(), "metadata:\n", "metadata:\n  annotations: {"+annotations+"}\n", 1)
}

// headerReader is a server that reads a PROXY header from each connection and answers with
// what it says, in a line; then it echoes.
func headerReader(t *testing.T, h *netns.Host, port uint16) {
	t.Helper()
	h.ServeTCP(t, fmt.Sprintf(":%d", port), func(c *net.TCPConn) {
		in := bufio.NewReader(c)
		header, err := proxyproto.Read(in)
		if err != nil {
			fmt.Fprintln(c, err)
			return
		}
		tlvs, err := header.TLVs()
		fmt.Fprintf(c, "v%d %s %s", header.Version, header.SourceAddr, header.DestinationAddr)
		for _, tlv := range tlvs {
			fmt.Fprintf(c, " %#x %s", byte(tlv.Type), tlv.Value)
		}
		fmt.Fprintln(c, errText(err))
		_, _ = io.Copy(c, in)
	})
}

func errText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

// converse writes a text with one call, half-closes, and returns the answer's first line
// and the rest.
func converse(c net.Conn, text string) (line, rest string, err error) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err = io.WriteString(c, text); err == nil {
		err = c.(*net.TCPConn).CloseWrite()
	}
	if err != nil {
		return "", "", err
	}
	in := bufio.NewReader(c)
	if line, err = in.ReadString('\n'); err != nil {
		return "", "", err
	}
	b, err := io.ReadAll(in)
	return strings.TrimSuffix(line, "\n"), string(b), err
}

// TestProxyProtocolIsSent: endpoints get a header with the client's address, the Service's,
// and in version 2 its name. What the client sends follows it, and alone counts in the
// record. With kernel flows the Service is relayed.
func TestProxyProtocolIsSent(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 1)
		headerReader(t, lab.Backends[0], 8080)
		p := newProxy(t, lab.Node)
		for i, version := range []string{"v1", "v2"} {
			s := webService{name: version, vips: []string{fmt.Sprintf("10.96.0.%d", 10+i), fmt.Sprintf("fd00:96::%d", 10+i)}, port: 80, endpoints: on(8080, lab.Backends...)}
			p.write(s.name+".yaml", s.annotated("sluice.dev/proxy-protocol: "+version))
		}
		p.start("--datapath", path)
		for _, vip := range []string{"10.96.0.10:80", "[fd00:96::10]:80", "10.96.0.11:80", "[fd00:96::11]:80"} {
			c := must.Get(lab.Client.Dial("tcp", vip))(t)
			want := "v1 " + c.LocalAddr().String() + " " + vip
			if strings.Contains(vip, "11") {
				want = "v2 " + c.LocalAddr().String() + " " + vip + " 0xe1 default/v2"
			}
			line, rest, err := converse(c, "hello")
			if line != want || rest != "hello" || err != nil {
				t.Errorf("%s: the endpoint reads %q and %q, want %q: %v", vip, line, rest, want, err)
			}
		}
		for _, r := range p.awaitRecords(4) {
			if r.BytesUp != uint64(len("hello")) || r.Path != "relay" || r.End != "client_fin" {
				t.Errorf("the record of %s: %d bytes, path %s, end %s", r.VIP, r.BytesUp, r.Path, r.End)
			}
		}
		p.stop()
	})
}

// TestProxyProtocolIsAccepted: a trusted client's header says who the client is, for source
// ranges, endpoints and records. Broken headers, slow ones and strangers are reset, and
// their records say why. No byte of them reaches the endpoint.
func TestProxyProtocolIsAccepted(t *testing.T) {
	t.Parallel()
	onPaths(t, acceptProxyProtocol)
}

func acceptProxyProtocol(t *testing.T, path string) {
	lab := netns.NewLab(t, 1)
	headerReader(t, lab.Backends[0], 8080)
	p := newProxy(t, lab.Node)
	s := webService{name: "web", vips: []string{vip4, vip6}, port: 80, endpoints: on(8080, lab.Backends...)}
	const annotations = "sluice.dev/proxy-protocol: v1, sluice.dev/accept-proxy-protocol: '10.1.0.2/32,fd00:1::/64'"
	p.write("web.yaml", s.annotated(annotations))
	ranged := webService{name: "ranged", vips: []string{"10.96.0.11"}, port: 80, endpoints: on(8080, lab.Backends...)}
	text := strings.Replace(ranged.annotated(annotations), "type: ClusterIP", "type: LoadBalancer\n  loadBalancerSourceRanges: [192.0.2.0/24]", 1)
	p.write("ranged.yaml", strings.Replace(text, "---\n", "status: {loadBalancer: {ingress: [{ip: 198.51.100.1}]}}\n---\n", 1))
	p.start("--datapath", path)
	dial := func(from *netns.Host, address string) net.Conn {
		t.Helper()
		return must.Get(from.Dial("tcp", address))(t)
	}
	v4, v6 := vip4+":80", "["+vip6+"]:80"
	served := 0
	accepted := func(address, header, want string, client string) {
		t.Helper()
		c := dial(lab.Client, address)
		line, rest, err := converse(c, header+"hello")
		if line != want || rest != "hello" || err != nil {
			t.Errorf("%.50q to %s: the endpoint reads %q and %q, want %q: %v", header, address, line, rest, want, err)
		}
		served++
		list := p.awaitRecords(served)
		peer := c.LocalAddr().String()
		if client == "" {
			client = peer
			peer = "invalid AddrPort"
		}
		if r := list[len(list)-1]; r.Client.String() != client || r.Via.String() != peer || r.BytesUp != 5 || r.Path != "relay" {
			t.Errorf("%.50q to %s: the record has client %s, via %s, %d bytes, path %s; want %s via %s", header, address, r.Client, r.Via, r.BytesUp, r.Path, client, peer)
		}
	}
	two := proxyproto.Header{Version: 2, Command: proxyproto.PROXY, TransportProtocol: proxyproto.TCPv6,
		SourceAddr:      net.TCPAddrFromAddrPort(netip.MustParseAddrPort("[2001:db8::7]:5")),
		DestinationAddr: net.TCPAddrFromAddrPort(netip.MustParseAddrPort("[2001:db8::1]:80"))}
	b := must.Get(two.Format())(t)
	accepted(v4, "PROXY TCP4 192.0.2.7 203.0.113.1 41822 80\r\n", "v1 192.0.2.7:41822 "+v4, "192.0.2.7:41822")
	accepted(v6, string(b), "v1 [2001:db8::7]:5 "+v6, "[2001:db8::7]:5")
	accepted(v4, string(b), "v1 [2001:db8::7]:5 "+v4, "[2001:db8::7]:5")
	accepted("198.51.100.1:80", "PROXY TCP4 192.0.2.7 203.0.113.1 41822 80\r\n", "v1 192.0.2.7:41822 198.51.100.1:80", "192.0.2.7:41822")
	c := dial(lab.Client, v4)
	if line, rest, err := converse(c, "PROXY UNKNOWN\r\nhello"); line != "v1 "+c.LocalAddr().String()+" "+v4 || rest != "hello" || err != nil {
		t.Errorf("the load balancer itself: %q, %q, %v", line, rest, err)
	}
	if r := p.awaitRecords(served + 1)[served]; r.Client.String() != c.LocalAddr().String() || r.Via.IsValid() {
		t.Errorf("the load balancer itself: client %s, via %s", r.Client, r.Via)
	}
	served++

	want := map[string]int{}
	refused := func(from *netns.Host, address, text, end string) {
		t.Helper()
		want[end]++
		c, err := from.Dial("tcp", address)
		if errors.Is(err, unix.ECONNRESET) {
			return // before the client had noticed that it is connected
		}
		must.OK(t, err)
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		if _, err := io.WriteString(c, text); err != nil {
			return // the reset came first
		}
		if b, err := io.ReadAll(c); len(b) > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%.50q: %q, %v; want a reset", text, b, err)
		}
	}
	const fine = "PROXY TCP4 192.0.2.7 203.0.113.1 41822 80\r\n"
	refused(lab.Client, v4, "hello\r\n", "proxy_header")
	refused(lab.Client, v4, strings.Replace(fine, "192.0.2.7", "192.0.2.777", 1), "proxy_header")
	refused(lab.Client, v4, "PROXY "+strings.Repeat("x", 200), "proxy_header")
	refused(lab.Client, v4, fine[:20], "proxy_header_timeout")
	refused(lab.Client, v4, "", "proxy_header_timeout")
	refused(lab.Backends[0], v4, fine+"hello", "proxy_not_trusted")
	refused(lab.Client, "198.51.100.1:80", strings.Replace(fine, "192.0.2.7", "203.0.113.7", 1), "not_admitted")
	// A load balancer's look at the port is no broken header.
	c = dial(lab.Client, v4)
	_ = c.(*net.TCPConn).CloseWrite()
	_, _ = io.ReadAll(c)
	_ = c.Close()
	want["client_fin"]++

	// Headers with mistakes: none gets through, and nothing is left of them.
	count := 300
	if full() {
		count = 10000
	}
	before := p.settle(nil)
	r := rand.New(rand.NewPCG(1, 2))
	texts := make([]string, count)
	for i := range texts {
		text := []byte(fine)
		if i%2 == 1 {
			text = []byte(string(b))
			text[r.IntN(12)] ^= byte(1 + r.IntN(255)) // of the signature
		} else {
			text[r.IntN(11)] ^= byte(1 + r.IntN(255)) // of what precedes the addresses
		}
		texts[i] = string(text) + strings.Repeat("\n", 200) // so that none waits for more
	}
	for _, v := range crowd(count, 16, func(i int) (v visit) {
		c, err := lab.Client.Dial("tcp", v4)
		if err != nil {
			v.err = err
			return v
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		if _, err := io.WriteString(c, texts[i]); err != nil {
			return v // the reset came first
		}
		if b, err := io.ReadAll(c); len(b) > 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			v.err = fmt.Errorf("%q: %q, %w", texts[i], b, err)
		}
		return v
	}) {
		if v.err != nil {
			t.Error(v.err)
		}
	}
	want["proxy_header"] += count
	p.settle(&before)
	ends := map[string]int{}
	list := p.awaitRecords(served + len(texts) + 8)
	for _, r := range list[served:] {
		ends[r.End]++
		if r.Attempts > 0 {
			t.Errorf("%s reached an endpoint: %+v", r.End, r)
		}
	}
	t.Logf("%d headers with mistakes, and none reached an endpoint: the records end with %v", count, ends)
	check.Equalf(t, fmt.Sprint(ends), fmt.Sprint(want), "the records end with")
	wait.For(t, "metrics", stopTimeout, func() error {
		values, err := p.metrics()
		if err != nil {
			return err
		}
		for end, n := range want {
			got := 0.0
			for name, v := range values {
				if strings.HasPrefix(name, "sluice_connections_closed_total") && strings.Contains(name, `end="`+end+`"`) {
					got += v
				}
			}
			if end != "client_fin" && int(got) != n {
				return fmt.Errorf("%s: %v, want %d", end, got, n)
			}
		}
		return nil
	})
	p.stop()
}
