package flow

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// shortcutNet is a node with an open connection or session of each protocol and family,
// hidden and not.
type shortcutNet struct {
	*node
	conns []net.Conn
}

// newShortcutNet opens them. With queues, packets cannot go straight to the peers of the node's
// interfaces.
func newShortcutNet(t *testing.T, queues bool) *shortcutNet {
	return newShortcutNetWith(t, queues, nil)
}

func newShortcutNetWith(t *testing.T, queues bool, change func(*Options)) *shortcutNet {
	lab := netns.NewLab(t, 1)
	for _, name := range []string{"client", "b1"} {
		if !queues {
			break
		}
		must.OK(t, lab.Node.Netlink().QdiscAdd(&netlink.GenericQdisc{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: lab.Node.Link(t, name).Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
			QdiscType:  "pfifo",
		}))
	}
	b := lab.Backends[0]
	b.EchoTCP(t, 8080)
	b.EchoUDP(t, 8080)
	s := &shortcutNet{node: newNode(t, lab, change)}
	s.awaitShortcuts(true)
	for _, hidden := range []bool{false, true} {
		s.config.MasqueradeAll = hidden
		for _, e := range []struct {
			vip      string
			endpoint netip.Addr
		}{{vip4, b.IPv4}, {vip6, b.IPv6}} {
			s.apply(named("of-"+strconv.Itoa(e.endpoint.BitLen()), svc(e.vip, nil, at(e.endpoint, 8080))))
			for _, network := range []string{"tcp", "udp"} {
				c := lab.Client.Connect(t, network, net.JoinHostPort(e.vip, "80"))
				s.conns = append(s.conns, c)
			}
			s.ask(10)
		}
	}
	return s
}

// awaitShortcuts waits until packets may take shortcuts, or may not.
func (s *shortcutNet) awaitShortcuts(open bool) {
	s.t.Helper()
	wait.For(s.t, "shortcuts "+strconv.FormatBool(open), patience, func() error {
		const tick = 20 * time.Millisecond // of the clock that programs read
		if until := atomic.LoadUint64(&s.server.kernel.Control.ShortcutsUntil); (until > uint64(sys.Monotonic()-int64(tick))) != open {
			return fmt.Errorf("until %d", until)
		}
		return nil
	})
}

// awaitMost asks until nine tenths of the packets skip the IP stack. One of each second does
// not, and a busy machine may be late to say that they may.
func (s *shortcutNet) awaitMost() {
	s.t.Helper()
	const questions = 50
	all := uint64(2 * questions * len(s.conns))
	wait.For(s.t, "most packets skip the IP stack", patience, func() error {
		if took := s.ask(questions); took < all*9/10 {
			return fmt.Errorf("%d of %d do", took, all)
		}
		return nil
	})
}

// ask sends so many questions on each connection, and returns how many packets skipped the
// IP stack.
func (s *shortcutNet) ask(n int) uint64 {
	s.t.Helper()
	before := s.server.Stats().Kernel["shortcuts"]
	for _, c := range s.conns {
		_ = c.SetDeadline(time.Now().Add(patience))
		for range n {
			must.OKf(s.t, must.Err(line(c)), "%s %s", c.RemoteAddr().Network(), c.RemoteAddr())
		}
	}
	return s.server.Stats().Kernel["shortcuts"] - before
}

// TestShortcuts: packets of open connections skip the node's IP stack, both ways, until
// something there looks at them.
func TestShortcuts(t *testing.T) {
	t.Parallel()
	for _, queues := range []bool{false, true} {
		t.Run(fmt.Sprintf("queues=%v", queues), func(t *testing.T) { newShortcutNet(t, queues).endByARule(t) })
	}
}

func (s *shortcutNet) endByARule(t *testing.T) {
	s.awaitMost()
	s.lab.Node.NFT(t, `table inet other {
	chain forward {
		type filter hook forward priority filter
	}
}`)
	s.awaitShortcuts(false)
	if took := s.ask(50); took > 0 {
		t.Errorf("%d packets skipped another program's rules", took)
	}
	// What it drops stays dropped.
	s.lab.Node.NFT(t, "add rule inet other forward meta l4proto udp drop")
	c := s.conns[1]
	_ = c.SetDeadline(time.Now().Add(100 * time.Millisecond))
	if said, err := line(c); err == nil {
		t.Errorf("a dropped datagram was answered: %q", said)
	}
	s.lab.Node.NFT(t, "delete table inet other")
	s.awaitMost()
}

// TestShortcutsEndWithTheProcess: nobody checks any more who looks at packets.
func TestShortcutsEndWithTheProcess(t *testing.T) {
	root := netns.MountBPF(t)
	s := newShortcutNetWith(t, false, func(o *Options) { o.BPFRoot, o.Name = root, "test" })
	s.server.interfaces.Close(true) // its goroutine ends and the programs stay, as with a killed process
	s.awaitShortcuts(false)
	if took := s.ask(20); took > 0 {
		t.Errorf("%d packets skipped the IP stack", took)
	}
}

// TestShortcutsKeepPathMTU: what is too long for the way takes the IP stack, which says so.
func TestShortcutsKeepPathMTU(t *testing.T) {
	s := newShortcutNet(t, false)
	link := s.lab.Node.Link(t, "b1")
	must.OK(t, s.lab.Node.Netlink().LinkSetMTU(link, 1300))
	payload := make([]byte, 100_000)
	for i := range payload {
		payload[i] = 'a'
	}
	payload[len(payload)-1] = '\n'
	for _, c := range s.conns {
		if c.RemoteAddr().Network() != "tcp" {
			continue
		}
		_ = c.SetDeadline(time.Now().Add(patience))
		go func() { _, _ = c.Write(payload) }()
		for got, b := 0, make([]byte, 1<<16); got < len(payload); {
			n, err := c.Read(b)
			must.OKf(t, err, "%s: after %d bytes", c.RemoteAddr(), got)
			got += n
		}
	}
}

// TestShortcutsAreNoLongerThanTheWay: the sender hears of each datagram that is longer than a
// route allows, also of one that is a part of a batch.
func TestShortcutsAreNoLongerThanTheWay(t *testing.T) {
	const mtu, long = 1300, 1300 // without headers
	for _, count := range []int{1, 4} {
		t.Run(fmt.Sprintf("batch=%d", count), func(t *testing.T) {
			s := newShortcutNet(t, false)
			for _, ip := range []netip.Addr{s.lab.Backends[0].IPv4, s.lab.Backends[0].IPv6} {
				must.OK(t, s.lab.Node.Netlink().RouteAdd(&netlink.Route{
					LinkIndex: s.lab.Node.Link(t, "b1").Attrs().Index, Scope: netlink.SCOPE_LINK,
					Dst: &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(ip.BitLen(), ip.BitLen())},
					MTU: mtu, MTULock: true, // others keep all packets from shortcuts
				}))
			}
			atomic.AddUint32(&s.server.kernel.Control.WaysNumber, 2) // else hops are known for some ms more
			for _, c := range s.conns {
				if u, ok := c.(*net.UDPConn); ok {
					always(t, u, long)
					s.refused(u, make([]byte, count*long))
				}
			}
		})
	}
}

// always has a socket send datagrams of a size whole, whatever it has heard, and several at once.
func always(t *testing.T, c *net.UDPConn, size int) {
	t.Helper()
	raw := must.Get(c.SyscallConn())(t)
	set := func(fd uintptr, level, option, value int) {
		check.OK(t, unix.SetsockoptInt(int(fd), level, option, value))
	}
	must.OK(t, raw.Control(func(fd uintptr) {
		if c.RemoteAddr().(*net.UDPAddr).IP.To4() != nil {
			set(fd, unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_PROBE)
		} else {
			set(fd, unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_PROBE)
		}
		set(fd, unix.IPPROTO_UDP, unix.UDP_SEGMENT, size)
	}))
}

// refused sends too long datagrams. Each time a short one has been answered just before, so
// that they would take the shortcut.
func (s *shortcutNet) refused(c *net.UDPConn, datagrams []byte) {
	s.t.Helper()
	for i := range 5 {
		_ = c.SetDeadline(time.Now().Add(patience))
		must.OKf(s.t, must.Err(line(c)), "%s", c.RemoteAddr())
		must.OKf(s.t, must.Err(c.Write(datagrams)), "%s", c.RemoteAddr())
		if n, err := c.Read(make([]byte, 1<<16)); !errors.Is(err, unix.EMSGSIZE) {
			s.t.Fatalf("%s, write %d: %d bytes came back: %v", c.RemoteAddr(), i, n, err)
		}
	}
}
