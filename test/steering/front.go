package steering

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Front is a proxy's set of listening sockets: transparent TCP and UDP sockets on
// the loopback addresses, or, in a mode that binds each destination, one for each.
// It sends the front's name and the destination address to each TCP connection,
// and then echoes. It answers a datagram with the same text, from the datagram's
// destination.
type Front struct {
	t       testing.TB
	node    *netns.Host
	name    string
	targets [2][2]redirect.Target // by family, then TCP or UDP

	mu     sync.Mutex
	closed bool
	open   []interface{ Close() error }
	bound  map[service.Destination]binding
	served sync.WaitGroup
}

// NewFront creates a front on a node; it is closed with the test.
func NewFront(t testing.TB, node *netns.Host, name string) *Front {
	t.Helper()
	f := &Front{t: t, node: node, name: name, bound: map[service.Destination]binding{}}
	t.Cleanup(f.close)
	for family, addr := range []netip.Addr{redirect.ListenIPv4, redirect.ListenIPv6} {
		for i, p := range []service.Protocol{service.TCP, service.UDP} {
			target, _, err := f.listen(service.Destination{Addr: addr, Protocol: p}, nil)
			must.OK(t, err)
			f.targets[family][i] = target
		}
	}
	return f
}

// Target returns the listening socket of a destination.
func (f *Front) Target(d service.Destination) redirect.Target {
	i := 0
	if d.Protocol == service.UDP {
		i = 1
	}
	return f.targets[service.FamilyOf(d.Addr)][i]
}

// Says is the text that clients of a destination get.
func (f *Front) Says(d service.Destination) string {
	return f.name + " for " + netip.AddrPortFrom(d.Addr, d.Port).String()
}

// Bind does what a mode with Traits.BindEach leaves to the listener: it listens at
// each destination to steer, and binds a socket whose filter drops everything at
// each destination to drop (F5).
func (f *Front) Bind(p redirect.Plan) {
	f.t.Helper()
	for d, b := range f.bound {
		steered := p.Steer.Has(d)
		silent := p.Silent.Has(d)
		if !steered && !silent || silent != b.silent {
			b.close()
			delete(f.bound, d)
		}
	}
	open := func(d service.Destination, filter []unix.SockFilter) {
		if f.bound[d].close != nil {
			return
		}
		_, done, err := f.listen(d, filter)
		must.OK(f.t, err)
		f.bound[d] = binding{done, len(filter) > 0}
	}
	for d := range p.Steer.Keys() {
		open(d, nil)
	}
	for d := range p.Silent.Keys() {
		open(d, []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K}})
	}
}

// binding is a socket at a destination.
type binding struct {
	close  func()
	silent bool
}

// listen opens a socket on an address and serves it.
func (f *Front) listen(d service.Destination, filter []unix.SockFilter) (t redirect.Target, done func(), err error) {
	at := netip.AddrPortFrom(d.Addr, d.Port).String()
	lc := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		return errors.Join(raw.Control(func(fd uintptr) {
			t.FD = int(fd)
			err = prepare(t.FD, d, filter)
		}), err)
	}}
	lc.SetMultipathTCP(false)
	if d.Protocol == service.UDP {
		var pc net.PacketConn
		if err := f.node.Do(func() (err error) {
			pc, err = lc.ListenPacket(f.t.Context(), "udp", at)
			return err
		}); err != nil {
			return t, nil, err
		}
		t.Port = netip.MustParseAddrPort(pc.LocalAddr().String()).Port()
		f.serve(pc, func() { f.answerDatagrams(pc.(*net.UDPConn)) })
		return t, func() { _ = pc.Close() }, nil
	}
	l, err := f.node.ListenConfig(&lc, "tcp", at)
	if err != nil {
		return t, nil, err
	}
	t.Port = netip.MustParseAddrPort(l.Addr().String()).Port()
	f.serve(l, func() {
		netns.Accept(l, func(c net.Conn) {
			f.serve(c, func() { f.greetAndEcho(c) })
		})
	})
	return t, func() { _ = l.Close() }, nil
}

// prepare makes a socket transparent, and makes a UDP socket report the
// destination of each datagram.
func prepare(fd int, d service.Destination, filter []unix.SockFilter) error {
	level, transparent, recvDst := unix.SOL_IP, unix.IP_TRANSPARENT, unix.IP_RECVORIGDSTADDR
	if d.Addr.Is6() {
		level, transparent, recvDst = unix.SOL_IPV6, unix.IPV6_TRANSPARENT, unix.IPV6_RECVORIGDSTADDR
	}
	err := unix.SetsockoptInt(fd, level, transparent, 1)
	if err == nil && d.Protocol == service.UDP {
		err = errors.Join(unix.SetsockoptInt(fd, level, recvDst, 1), unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
	}
	if err == nil && len(filter) > 0 {
		err = unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]})
	}
	return err
}

func (f *Front) serve(what interface{ Close() error }, serve func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		_ = what.Close()
		return
	}
	f.open = append(f.open, what)
	f.served.Add(1)
	go func() {
		defer f.served.Done()
		serve()
	}()
}

func (f *Front) close() {
	f.mu.Lock()
	f.closed = true
	for _, o := range f.open {
		_ = o.Close()
	}
	f.mu.Unlock()
	f.served.Wait()
}

func (f *Front) greetAndEcho(c net.Conn) {
	defer c.Close()
	if _, err := fmt.Fprintf(c, "%s for %s\n", f.name, c.LocalAddr()); err != nil {
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

func (f *Front) answerDatagrams(pc *net.UDPConn) {
	buf, oob := make([]byte, 65536), make([]byte, 256)
	for {
		_, n, _, from, err := pc.ReadMsgUDPAddrPort(buf, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		to, ok := sentTo(oob[:n])
		if err != nil || !ok {
			continue
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		d := service.Destination{Addr: to.Addr(), Port: to.Port(), Protocol: service.UDP}
		if c, err := f.node.Dialer(DialerFrom("udp", to), "udp", from.String()); err == nil {
			_, _ = c.Write([]byte(f.Says(d)))
			_ = c.Close()
		}
	}
}

// DialerFrom connects, or sends datagrams, from an address that may be non-local.
func DialerFrom(network string, as netip.AddrPort) *net.Dialer {
	d := service.Destination{Addr: as.Addr(), Port: as.Port(), Protocol: service.TCP}
	var local net.Addr = net.TCPAddrFromAddrPort(as)
	if network == "udp" {
		d.Protocol, local = service.UDP, net.UDPAddrFromAddrPort(as)
	}
	return &net.Dialer{
		Timeout:   patience,
		LocalAddr: local,
		Control: func(_, _ string, raw syscall.RawConn) error {
			var err error
			return errors.Join(raw.Control(func(fd uintptr) { err = prepare(int(fd), d, nil) }), err)
		},
	}
}

// sentTo reads the original destination from control messages.
func sentTo(oob []byte) (netip.AddrPort, bool) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return netip.AddrPort{}, false
	}
	for i := range messages {
		to, err := unix.ParseOrigDstAddr(&messages[i])
		if err != nil {
			continue
		}
		switch to := to.(type) {
		case *unix.SockaddrInet4:
			return netip.AddrPortFrom(netip.AddrFrom4(to.Addr), uint16(to.Port)), true
		case *unix.SockaddrInet6:
			return netip.AddrPortFrom(netip.AddrFrom16(to.Addr), uint16(to.Port)), true
		}
	}
	return netip.AddrPort{}, false
}
