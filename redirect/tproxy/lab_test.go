package tproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
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

func tcp(s string) service.Destination  { return destination(s, service.TCP) }
func udp(s string) service.Destination  { return destination(s, service.UDP) }
func sctp(s string) service.Destination { return destination(s, service.SCTP) }

func destination(s string, p service.Protocol) service.Destination {
	ap := netip.MustParseAddrPort(s)
	return service.Destination{Addr: ap.Addr(), Port: ap.Port(), Protocol: p}
}

// planOf makes a plan with the usual service ranges.
func planOf(parts ...any) redirect.Plan {
	p := redirect.Plan{
		Local: redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd01::/112")),
	}
	for _, part := range parts {
		part.(func(*redirect.Plan))(&p)
	}
	return p
}

// steerTo adds destinations to a plan and makes their addresses cluster IPs.
func steerTo(f front, ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Steer = p.Steer.With(d, f.target(d))
			p.ClusterIPs = p.ClusterIPs.With(d.Addr, struct{}{})
		}
	}
}

func refusing(ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Refuse = p.Refuse.With(d, struct{}{})
			p.ClusterIPs = p.ClusterIPs.With(d.Addr, struct{}{})
		}
	}
}

func silencing(ds ...service.Destination) func(*redirect.Plan) {
	return func(p *redirect.Plan) {
		for _, d := range ds {
			p.Silent = p.Silent.With(d, struct{}{})
			p.ClusterIPs = p.ClusterIPs.With(d.Addr, struct{}{})
		}
	}
}

// front is a pair of transparent listeners on the loopback addresses, as the
// proxy's are. Each connection is told the front's name and the destination it
// was made to, and echoed.
type front struct {
	name         string
	port4, port6 uint16
}

func (f front) target(d service.Destination) redirect.Target {
	if d.Addr.Is4() {
		return redirect.Target{Port: f.port4}
	}
	return redirect.Target{Port: f.port6}
}

// says is what a front greets a client with who asked for a destination.
func (f front) says(d service.Destination) string {
	return f.name + " for " + netip.AddrPortFrom(d.Addr, d.Port).String()
}

func newFront(t testing.TB, node *netns.Host, name string) front {
	t.Helper()
	var served sync.WaitGroup
	var mu sync.Mutex
	var conns []net.Conn
	open := func(addr netip.Addr) uint16 {
		lc := net.ListenConfig{Control: transparent}
		lc.SetMultipathTCP(false)
		l, err := node.ListenConfig(&lc, "tcp", netip.AddrPortFrom(addr, 0).String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
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
					greetAndEcho(c, name)
				}()
			}
		}()
		return netip.MustParseAddrPort(l.Addr().String()).Port()
	}
	t.Cleanup(func() {
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		served.Wait()
	})
	return front{name: name, port4: open(redirect.ListenIPv4), port6: open(redirect.ListenIPv6)}
}

func greetAndEcho(c net.Conn, name string) {
	defer c.Close()
	if _, err := fmt.Fprintf(c, "%s for %s\n", name, c.LocalAddr()); err != nil {
		return
	}
	buf := make([]byte, 4096)
	for {
		n, err := c.Read(buf)
		if err != nil {
			return
		}
		if _, err := c.Write(buf[:n]); err != nil {
			return
		}
	}
}

func transparent(network, _ string, raw syscall.RawConn) error {
	level, option := unix.SOL_IP, unix.IP_TRANSPARENT
	if network[len(network)-1] == '6' {
		level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	var err error
	return errors.Join(raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), level, option, 1)
	}), err)
}

// newRedirector makes one inside the node, closed at the end of the test.
func newRedirector(t testing.TB, node *netns.Host, opts Options) *Redirector {
	t.Helper()
	opts.NetNS = node.FD()
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

// reach is what a client gets who connects: a greeting, "refused", "silence",
// or an error's text.
func reach(from *netns.Host, d service.Destination) string {
	got, err := from.Ask("tcp", netip.AddrPortFrom(d.Addr, d.Port).String())
	switch {
	case err == nil:
		return got
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	default:
		return err.Error()
	}
}

// isSilent tells whether connecting gets no answer for a while.
func isSilent(t testing.TB, from *netns.Host, d service.Destination) bool {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), silence)
	defer cancel()
	var err error
	_ = from.Do(func() error {
		var c net.Conn
		if c, err = new(net.Dialer).DialContext(ctx, "tcp", netip.AddrPortFrom(d.Addr, d.Port).String()); err == nil {
			_ = c.Close()
		}
		return nil
	})
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded)
}

// askUDP sends a datagram and gives "refused" or what else came.
func askUDP(t testing.TB, from *netns.Host, to string) string {
	t.Helper()
	c, err := from.Dial("udp", to)
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	if _, err := c.Write([]byte("hello")); err != nil {
		return err.Error()
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	_, err = c.Read(make([]byte, 100))
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case err != nil:
		return err.Error()
	}
	return "an answer"
}
