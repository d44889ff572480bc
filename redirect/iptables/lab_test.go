package iptables

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// probes are what Probe has said, by variant: func() error.
var probes sync.Map

// modes runs a test with each variant of the programs, with ipset and without.
// A variant is left out only where its programs are missing or the kernel says
// that it cannot do it. The variants run beside each other; within one, the
// programs of legacy have a lock that is one for all namespaces.
func modes(t *testing.T, test func(t *testing.T, opts Options)) {
	for _, variant := range []Variant{NFT, Legacy} {
		t.Run(string(variant), func(t *testing.T) {
			t.Parallel()
			for _, noSets := range []bool{false, true} {
				name := "ipset"
				if noSets {
					name = "rules"
				}
				t.Run(name, func(t *testing.T) {
					netns.Require(t)
					opts := Options{Variant: variant, NoSets: noSets}
					probe, _ := probes.LoadOrStore(string(variant)+name, sync.OnceValue(func() error { return Probe(opts) }))
					var missing *redirect.MissingError
					if err := probe.(func() error)(); errors.As(err, &missing) {
						t.Skipf("SKIP-NEEDS: %v", err)
					} else if err != nil {
						t.Fatal(err)
					}
					test(t, opts)
				})
			}
		})
	}
}

func tcp(s string) service.Destination { return destinationAt(s, service.TCP) }
func udp(s string) service.Destination { return destinationAt(s, service.UDP) }

func destinationAt(s string, p service.Protocol) service.Destination {
	ap := netip.MustParseAddrPort(s)
	return service.Destination{Addr: ap.Addr(), Port: ap.Port(), Protocol: p}
}

// planOf makes a plan with the usual service ranges.
func planOf(parts ...func(*redirect.Plan)) redirect.Plan {
	p := redirect.Plan{
		Local: redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd01::/112")),
	}
	for _, part := range parts {
		part(&p)
	}
	return p
}

// address makes the address of a destination a cluster IP if it is in the
// service ranges, and else one that is not ours.
func addressIn(p *redirect.Plan, a netip.Addr) {
	for l := range p.Local.Keys() {
		if l.Contains(a) {
			p.ClusterIPs = p.ClusterIPs.With(a, struct{}{})
			return
		}
	}
	p.Foreign = p.Foreign.With(a, struct{}{})
}

func steerTo(f front, ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Steer = p.Steer.With(d, f.target(d))
			addressIn(p, d.Addr)
		}
	}
}

func refusing(ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Refuse = p.Refuse.With(d, struct{}{})
			addressIn(p, d.Addr)
		}
	}
}

func silencing(ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Silent = p.Silent.With(d, struct{}{})
			addressIn(p, d.Addr)
		}
	}
}

func lingering(ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Lingering = p.Lingering.With(d, struct{}{})
			addressIn(p, d.Addr)
		}
	}
}

// front is the proxy's listeners: a transparent TCP listener and UDP socket on
// each of the loopback addresses. A client is told the front's name and the
// destination it asked for.
type front struct {
	name     string
	tcp, udp [versions]uint16
}

func (f front) target(d service.Destination) redirect.Target {
	if d.Protocol == service.UDP {
		return redirect.Target{Port: f.udp[versionOf(d.Addr)]}
	}
	return redirect.Target{Port: f.tcp[versionOf(d.Addr)]}
}

func (f front) says(d service.Destination) string {
	return f.name + " for " + netip.AddrPortFrom(d.Addr, d.Port).String()
}

func newFront(t testing.TB, node *netns.Host, name string) front {
	t.Helper()
	f := front{name: name}
	var served sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	t.Cleanup(func() {
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		served.Wait()
	})
	for v := range versions {
		lc := net.ListenConfig{Control: transparent}
		lc.SetMultipathTCP(false)
		l, err := node.ListenConfig(&lc, "tcp", netip.AddrPortFrom(families[v].listen, 0).String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		f.tcp[v] = netip.MustParseAddrPort(l.Addr().String()).Port()
		served.Add(1)
		go func() {
			defer served.Done()
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				mu.Lock()
				conns = append(conns, c)
				mu.Unlock()
				served.Add(1)
				go func() {
					defer served.Done()
					defer c.Close()
					fmt.Fprintf(c, "%s for %s\n", name, c.LocalAddr())
					buf := make([]byte, 4096)
					for n, err := c.Read(buf); err == nil; n, err = c.Read(buf) {
						if _, err := c.Write(buf[:n]); err != nil {
							return
						}
					}
				}()
			}
		}()
		pc := transparentUDP(t, node, netip.AddrPortFrom(families[v].listen, 0))
		f.udp[v] = netip.MustParseAddrPort(pc.LocalAddr().String()).Port()
		served.Add(1)
		go func() {
			defer served.Done()
			answerUDP(node, pc, name)
		}()
		t.Cleanup(func() { _ = pc.Close() })
	}
	return f
}

// answerUDP tells each client whom it asked, from the address that it asked.
func answerUDP(node *netns.Host, pc *net.UDPConn, name string) {
	buf, control := make([]byte, 2048), make([]byte, 128)
	for {
		_, n, _, from, err := pc.ReadMsgUDPAddrPort(buf, control)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			continue
		}
		to, err := originalDestination(control[:n])
		if err != nil {
			continue
		}
		answer, err := node.Dialer(&net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(to), Control: transparent}, "udp",
			netip.AddrPortFrom(from.Addr().Unmap(), from.Port()).String())
		if err != nil {
			continue
		}
		fmt.Fprintf(answer, "%s for %s\n", name, to)
		_ = answer.Close()
	}
}

func originalDestination(control []byte) (netip.AddrPort, error) {
	list, err := unix.ParseSocketControlMessage(control)
	if err != nil || len(list) == 0 {
		return netip.AddrPort{}, fmt.Errorf("control messages: %v", err)
	}
	sa, err := unix.ParseOrigDstAddr(&list[0])
	if err != nil {
		return netip.AddrPort{}, err
	}
	switch a := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(a.Addr), uint16(a.Port)), nil
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(a.Addr), uint16(a.Port)), nil
	}
	return netip.AddrPort{}, errors.New("no address")
}

func transparentUDP(t testing.TB, node *netns.Host, at netip.AddrPort) *net.UDPConn {
	t.Helper()
	lc := net.ListenConfig{Control: transparent}
	var pc net.PacketConn
	err := node.Do(func() (err error) {
		pc, err = lc.ListenPacket(context.Background(), "udp", at.String())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return pc.(*net.UDPConn)
}

// transparent lets a socket have any address, and UDP sockets tell what
// address datagrams were sent to.
func transparent(network, _ string, raw syscall.RawConn) error {
	level, options := unix.SOL_IP, []int{unix.IP_TRANSPARENT, unix.IP_RECVORIGDSTADDR}
	if network[len(network)-1] == '6' {
		level, options = unix.SOL_IPV6, []int{unix.IPV6_TRANSPARENT, unix.IPV6_RECVORIGDSTADDR}
	}
	var err error
	return errors.Join(raw.Control(func(fd uintptr) {
		for _, o := range options {
			err = errors.Join(err, unix.SetsockoptInt(int(fd), level, o, 1))
		}
		err = errors.Join(err, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	}), err)
}

// newOne makes a Redirector inside the node, closed at the end of the test.
func newOne(t testing.TB, node *netns.Host, opts Options) *Redirector {
	t.Helper()
	opts.Route.NetNS = node.FD()
	r, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	return r
}

func apply(t testing.TB, r *Redirector, p redirect.Plan) {
	t.Helper()
	if err := r.Apply(p); err != nil {
		t.Fatal(err)
	}
}

// silence is how long nobody answers who never will, and longest how long an
// answer is waited for that is to come.
const silence, longest = 200 * time.Millisecond, 20 * time.Second

// reach is what a client gets who asks a destination: a server's greeting,
// "refused", "silent", or an error's text.
func reach(from *netns.Host, d service.Destination) string {
	return reachWithin(from, d, longest)
}

// patienceFor is how long to wait for what is wanted: silence need not be
// listened to for long.
func patienceFor(want string) time.Duration {
	if want == "silent" {
		return silence
	}
	return longest
}

func reachWithin(from *netns.Host, d service.Destination, patience time.Duration) string {
	network := protocolName(d.Protocol)
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var c net.Conn
	err := from.Do(func() (err error) {
		c, err = new(net.Dialer).DialContext(ctx, network, netip.AddrPortFrom(d.Addr, d.Port).String())
		return err
	})
	if err == nil {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		if network == "udp" {
			_, _ = c.Write([]byte("hello"))
		}
		buf := make([]byte, 200)
		var n int
		if n, err = c.Read(buf); err == nil {
			line, _, _ := strings.Cut(string(buf[:n]), "\n")
			return line
		}
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, context.DeadlineExceeded):
		return "silent"
	}
	return err.Error()
}

// open is a connection that a client made and keeps.
type open struct {
	net.Conn
	what string
}

func connect(t testing.TB, from *netns.Host, d service.Destination) open {
	t.Helper()
	c, err := from.Dial("tcp", netip.AddrPortFrom(d.Addr, d.Port).String())
	if err != nil {
		t.Fatalf("from %s: %v", from.Name(), err)
	}
	t.Cleanup(func() { _ = c.Close() })
	if _, err := netns.AskOn(c); err != nil {
		t.Fatalf("from %s to %v: %v", from.Name(), d, err)
	}
	return open{c, "from " + from.Name() + " to " + redirect.Format(d)}
}

// works tells whether bytes still go both ways.
func (o open) works(t testing.TB, when string) {
	t.Helper()
	sent, got := bytes.Repeat([]byte("all well? "), 100), make([]byte, 1000)
	_ = o.SetDeadline(time.Now().Add(longest))
	_, err := o.Write(sent)
	for n := 0; err == nil && n < len(got); {
		var m int
		m, err = o.Read(got[n:])
		n += m
	}
	if err != nil || !bytes.Equal(sent, got) {
		t.Errorf("%s: the connection %s: %v", when, o.what, err)
	}
}

// program runs one of iptables' programs, or ipset, in a namespace.
func program(t testing.TB, n *netns.Namespace, name string, args ...string) string {
	t.Helper()
	path := find(name)
	if path == "" {
		t.Fatalf("no program %s", name)
	}
	cmd := n.Command(t, path, args...)
	var problems bytes.Buffer // a warning among them, which is no rule
	cmd.Stderr = &problems
	out, err := cmd.Output()
	if err != nil && !errors.Is(err, exec.ErrNotFound) {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, problems.Bytes())
	}
	return string(out)
}

// dump is everything that this way of steering may touch. Tables of the legacy
// variant are there as soon as somebody looked at them.
func dump(t testing.TB, n *netns.Namespace) string {
	t.Helper()
	var b strings.Builder
	b.WriteString(n.Dump(t))
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, table := range tableNames {
			program(t, n, family+"-legacy", "-t", table, "-S")
			b.WriteString(withoutCounters(program(t, n, family+"-legacy-save", "-t", table)))
		}
	}
	b.WriteString(program(t, n, "ipset", "save"))
	return b.String()
}

func withoutCounters(text string) string {
	var b strings.Builder
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		if strings.HasPrefix(line, ":") {
			line, _, _ = strings.Cut(line, "[")
			line += "\n"
		}
		b.WriteString(line)
	}
	return b.String()
}

func compare(t *testing.T, before, after string) {
	t.Helper()
	if before == after {
		return
	}
	was, is := strings.Split(before, "\n"), strings.Split(after, "\n")
	for _, l := range was {
		if !slices.Contains(is, l) {
			t.Errorf("gone: %s", l)
		}
	}
	for _, l := range is {
		if !slices.Contains(was, l) {
			t.Errorf("left: %s", l)
		}
	}
	if !t.Failed() {
		t.Errorf("not the same order:\n%s\nwas:\n%s", after, before)
	}
}
