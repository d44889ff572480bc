package stream

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/pires/go-proxyproto"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
	"github.com/sluice-proxy/sluice/test/wait"
)

// version2 returns a header of version 2 with any payload.
func version2(command, family byte, payload string) string {
	b := append([]byte(nil), proxyproto.SIGV2...)
	b = append(b, command, family)
	return string(binary.BigEndian.AppendUint16(b, uint16(len(payload)))) + payload
}

// four is the payload of a header about 10.0.0.7:41822 and 10.96.0.10:80.
const four = "\x0a\x00\x00\x07\x0a\x60\x00\x0a\xa3\x5e\x00\x50"

var headers = []struct {
	header string
	client string // "invalid AddrPort" for the load balancer itself; "broken"; "partial"
}{
	{"PROXY TCP4 10.0.0.7 10.96.0.10 41822 80\r\n", "10.0.0.7:41822"},
	{"PROXY TCP6 fd00::7 fd00:96::a 41822 80\r\n", "[fd00::7]:41822"},
	{"PROXY TCP6 ::ffff:10.0.0.7 fd00:96::a 41822 80\r\n", "10.0.0.7:41822"},
	{"PROXY UNKNOWN\r\n", "invalid AddrPort"},
	{"PROXY UNKNOWN and whatever follows\r\n", "invalid AddrPort"},
	{"PROXY TCP4 127.0.0.1 10.96.0.10 41822 80\r\n", "invalid AddrPort"},
	{version2(0x21, 0x11, four), "10.0.0.7:41822"},
	{version2(0x21, 0x11, four+"\xe1\x00\x03a/b"), "10.0.0.7:41822"},
	{version2(0x20, 0x00, ""), "invalid AddrPort"},
	{version2(0x20, 0x11, four), "invalid AddrPort"},

	{"PROXY TCP4 10.0.0.7 10.96.0.10 41822 80\n", "broken"},
	{"PROXY TCP4 10.0.0.7 10.96.0.10 41822 65536\r\n", "broken"},
	{"PROXY TCP4 10.0.0.7 10.96.0.10 041822 80\r\n", "broken"},
	{"PROXY TCP4  10.0.0.7 10.96.0.10 41822 80\r\n", "broken"},
	{"PROXY TCP4 fd00::7 fd00:96::a 41822 80\r\n", "broken"},
	{"PROXY TCP4 0.0.0.0 10.96.0.10 41822 80\r\n", "broken"},
	{"PROXY TCP4 224.0.0.1 10.96.0.10 41822 80\r\n", "broken"},
	{"PROXYTCP4 10.0.0.7 10.96.0.10 41822 80\r\n", "broken"},
	{"PROXY \r\n", "broken"},
	{"PROXY " + strings.Repeat("x", 200), "broken"},
	{"GET / HTTP/1.1\r\n", "broken"},
	{"\r\n\r\n\x00\r\nQUIT ", "broken"},
	{version2(0x31, 0x11, four), "broken"},
	{version2(0x22, 0x11, four), "broken"},
	{version2(0x21, 0x12, four), "broken"}, // UDP
	{version2(0x21, 0x31, strings.Repeat("x", 216)), "broken"},
	{version2(0x21, 0x11, four[1:]), "broken"},
	{version2(0x21, 0x21, four), "broken"},
	{version2(0x21, 0x00, ""), "broken"},
	{version2(0x21, 0x11, four+strings.Repeat("x", longestHeader)), "broken"},

	{"", "partial"},
	{"P", "partial"},
	{"\r", "partial"},
	{"PROXY TCP4 10.0.0.7", "partial"},
	{string(proxyproto.SIGV2), "partial"},
	{version2(0x21, 0x11, four)[:20], "partial"},
}

// read reads the header that bytes begin with, as takeHeader does.
func read(h *headerReader, p []byte) (length int, client string) {
	length, err := lengthOf(p)
	switch err {
	case errPartial:
		return 0, "partial"
	case nil:
		a, err := h.parse(p[:length])
		if err == nil {
			return length, a.String()
		}
	}
	return 0, "broken"
}

// TestReadHeaders: what follows a whole header is not part of it, and each beginning of
// one is partial.
func TestReadHeaders(t *testing.T) {
	var h headerReader
	for _, tt := range headers {
		length, client := read(&h, []byte(tt.header))
		check.Equalf(t, client, tt.client, "%.40q", tt.header)
		if length == 0 {
			continue
		}
		for _, more := range []string{"\r\n", "GET / HTTP/1.1\r\n", tt.header} {
			if n, client := read(&h, []byte(tt.header+more)); n != len(tt.header) || client != tt.client {
				t.Errorf("%.40q with more behind it: %d bytes, %s", tt.header, n, client)
			}
		}
		for i := range tt.header {
			if _, client := read(&h, []byte(tt.header[:i])); client != "partial" {
				t.Errorf("%.40q: the first %d bytes are %s", tt.header, i, client)
			}
		}
	}
}

// FuzzReadHeader: whatever comes, a header is inside of the bytes and ends at the same
// place however much follows, and the library reads the same from a stream.
func FuzzReadHeader(f *testing.F) {
	for _, tt := range headers {
		f.Add([]byte(tt.header))
	}
	var h headerReader
	f.Fuzz(func(t *testing.T, p []byte) {
		length, client := read(&h, p)
		if length > len(p) || length > longestHeader {
			t.Fatalf("%d bytes of %d", length, len(p))
		}
		if length == 0 {
			return
		}
		if n, again := read(&h, append(bytes.Clone(p), "\r\nPROXY"...)); n != length || again != client {
			t.Errorf("with more behind it: %d bytes and %s, else %d and %s", n, again, length, client)
		}
		in := bufio.NewReaderSize(bytes.NewReader(p), 2*longestHeader)
		if _, err := proxyproto.Read(in); err != nil {
			t.Fatalf("the library says %v", err)
		}
		if rest, _ := io.ReadAll(in); len(p)-len(rest) != length {
			t.Errorf("the library reads %d bytes, not %d", len(p)-len(rest), length)
		}
	})
}

// TestWrittenHeadersAreRead: a header names the client, whatever the families, and version 2
// the Service.
func TestWrittenHeadersAreRead(t *testing.T) {
	var h headerReader
	for _, client := range []string{"10.0.0.7:41822", "[fd00::7]:1"} {
		for _, vip := range []string{"10.96.0.10:80", "[fd00:96::a]:80"} {
			for version := uint8(1); version <= 2; version++ {
				r := conntrack.Record{Client: netip.MustParseAddrPort(client), VIP: netip.MustParseAddrPort(vip), Port: &service.Port{
					Name: service.PortName{Name: service.Name{Namespace: "shop", Name: "cart"}}, SendProxy: version,
				}}
				b := proxyHeader(&r)
				if n, got := read(&h, b); n != len(b) || got != client {
					t.Errorf("version %d, %s to %s: %q is read as %s, %d bytes", version, client, vip, b, got, n)
				}
				if version == 2 && !bytes.HasSuffix(b, []byte("\xe1\x00\x09shop/cart")) {
					t.Errorf("%q does not end with the Service", b)
				}
			}
		}
	}
}

// awaitHeaders waits until so many connections wait for a header.
func (n *node) awaitHeaders(want int) {
	n.t.Helper()
	wait.Equal(n.t, "connections that wait for a header", patience, want, func() (found int) {
		for _, w := range n.server.workers {
			w.run(func() {
				w.shard.Each(func(r *conntrack.Record) {
					if r.Owner.(*conn).awaits == header {
						found++
					}
				})
			})
		}
		return found
	})
}

// TestHeadersNameClients: the endpoint gets what follows the header, however the header comes, and
// the record says which client it names and that the connection has waited.
func TestHeadersNameClients(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), nil)
	echo, good := n.echo(0, 8080), version2(0x21, 0x11, four)
	for i, tt := range []struct {
		service string
		parts   []string
		client  string // "" for the load balancer
	}{
		{"whole", []string{good + "a question\n"}, "10.0.0.7:41822"},
		{"pieces", []string{good[:5], good[5:20], good[20:], "a question\n"}, "10.0.0.7:41822"},
		{"line", []string{"PROXY TCP4 10.0.0.8 10.96.0.10 1 80\r\na question\n"}, "10.0.0.8:1"},
		{"local", []string{version2(0x20, 0x00, "") + "a question\n"}, ""},
	} {
		address := fmt.Sprintf("10.96.0.%d", i+1)
		n.apply(annotate(web(tt.service, address, echo), "accept-proxy-protocol", "10.1.0.2/32"))
		c := n.dial(address + ":80")
		n.awaitHeaders(1)
		for _, part := range tt.parts {
			must.OK(t, must.Err(io.WriteString(c, part)))
		}
		must.OK(t, c.CloseWrite())
		via := c.LocalAddr().String()
		answered(t, c)
		if tt.client == "" {
			tt.client, via = via, netip.AddrPort{}.String()
		}
		r := n.ended(tt.service)
		if r.Client.String() != tt.client || r.Via().String() != via {
			t.Errorf("%s: client %s by %s, want %s by %s", tt.service, r.Client, r.Via(), tt.client, via)
		}
		if r.BytesFromClient != 11 || r.WaitTime() == 0 || r.ConnectTime < r.WaitTime() {
			t.Errorf("%s: %d bytes, waited %d, connected at %d", tt.service, r.BytesFromClient, r.WaitTime(), r.ConnectTime)
		}
	}
}

// TestWithoutAGoodHeader: a connection without a good header, or above a limit, reaches no endpoint.
func TestWithoutAGoodHeader(t *testing.T) {
	netns.Require(t)
	n := newNode(t, netns.NewLab(t, 1), func(o *setup) { o.MaxServiceConnections = 1 })
	echo, good := n.echo(0, 8080), version2(0x21, 0x11, four)
	says := func(text string) func(*net.TCPConn, string) {
		return func(c *net.TCPConn, _ string) {
			check.OK(t, must.Err(io.WriteString(c, text)))
			isReset(t, c)
		}
	}
	for i, tt := range []struct {
		service string
		do      func(c *net.TCPConn, address string)
		end     conntrack.End
	}{
		{"broken", says("GET / HTTP/1.1\r\n\r\n"), conntrack.ProxyHeader},
		{"cut", func(c *net.TCPConn, _ string) {
			check.OK(t, must.Err(io.WriteString(c, good[:20])))
			check.OK(t, c.CloseWrite())
		}, conntrack.ProxyHeader},
		{"closed", func(c *net.TCPConn, _ string) { check.OK(t, c.CloseWrite()) }, conntrack.ClientFin},
		{"resets", func(c *net.TCPConn, _ string) {
			check.OK(t, errors.Join(c.SetLinger(0), c.Close()))
		}, conntrack.ClientReset},
		{"full", func(_ *net.TCPConn, address string) { wantReset(t, n.lab.Client, address) }, conntrack.LimitReached},
		{"goes", func(c *net.TCPConn, address string) {
			other := web("other", strings.TrimSuffix(address, ":80"), echo)
			other.Deleted = objects.Gone("goes", 1).Deleted
			n.apply(other)
			says(good)(c, "")
		}, conntrack.NoEndpoints},
	} {
		address := fmt.Sprintf("10.96.0.%d", i+1)
		n.apply(annotate(web(tt.service, address, echo), "accept-proxy-protocol", "10.1.0.2/32"))
		c := n.dial(address + ":80")
		n.awaitHeaders(1)
		tt.do(c, address+":80")
		r := n.ended(tt.service)
		if r.End != tt.end || r.Attempts != 0 {
			t.Errorf("%s: the record says %s after %d attempts, want %s", tt.service, r.End, r.Attempts, tt.end)
		}
		_ = c.Close()
		n.awaitHeaders(0)
	}
	n.apply(annotate(web("stranger", "10.96.0.99", echo), "accept-proxy-protocol", "10.1.0.3/32"))
	wantReset(t, n.lab.Client, "10.96.0.99:80")
	check.Equalf(t, n.ended("stranger").End, conntrack.ProxyNotTrusted, "the end of a stranger's connection")
}
