package datagram

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Forged ICMP messages neither end a session nor move an unanswered one. A message from
// the endpoint's address does not move an answered session either, because it does not
// quote a datagram of the session.
func TestForgedErrorsMoveNoSession(t *testing.T) {
	for _, vip := range []string{vip4, vip6} {
		t.Run(vip, func(t *testing.T) {
			lab := netns.NewLab(t, 3)
			n := newNode(t, lab, nil)
			address := func(h *netns.Host) netip.Addr {
				if vip == vip6 {
					return h.IPv6
				}
				return h.IPv4
			}
			one, two, stranger := lab.Backends[0], lab.Backends[1], lab.Backends[2]
			for _, h := range []*netns.Host{one, two} {
				h.EchoUDP(t, 5300)
			}
			n.apply(svc("echo", vip, nil, at(address(one), 5300), at(address(two), 5300)))
			to := netip.AddrPortFrom(netip.MustParseAddr(vip), 53).String()
			answered := client(t, lab.Client, to)
			endpoint := askWho(t, answered)
			for range 3 {
				must.Equalf(t, askWho(t, answered), endpoint, "the endpoint")
			}
			victim := address(map[string]*netns.Host{"b1:5300": one, "b2:5300": two}[endpoint])
			sources := []netip.Addr{address(stranger)}
			if vip == vip4 {
				sources = append(sources, victim)
			}
			// flood has the node receive so many messages, or lose the socket. The kernel
			// forwards messages without a matching socket to the client, whose address
			// they quote. Some may be lost on the way, so more are sent while they lack.
			const messages = 200
			flood := func(source netip.Addr, endpoint netip.AddrPort) {
				t.Helper()
				want := unreachables(t, lab.Node) + messages
				local := socketTo(t, lab.Node, endpoint)
				for range messages {
					forge(t, stranger, source, local, endpoint)
				}
				wait.True(t, "the node has received the messages", func() bool {
					if _, is := findSocketTo(t, lab.Node, endpoint); !is || unreachables(t, lab.Node) >= want {
						return true
					}
					forge(t, stranger, source, local, endpoint)
					return false
				})
			}
			for _, source := range sources {
				flood(source, at(victim, 5300))
				for range 4 {
					must.Equalf(t, askWho(t, answered), endpoint, "who answers after forged errors from %s", source)
				}
			}

			// A datagram that comes before the loops have read many errors is not lost.
			resume := n.stall()
			for range 4 {
				flood(address(stranger), at(victim, 5300))
			}
			must.OK(t, must.Err(answered.Write([]byte("q"))))
			resume()
			must.OK(t, answered.SetReadDeadline(time.Now().Add(patience)))
			must.OK(t, must.Err(answered.Read(make([]byte, 100))))

			// An unanswered session: both endpoints report what they receive.
			vip := netip.MustParseAddr(vip).Next().String()
			n.apply(svc("sink", vip, nil, at(address(one), 5301), at(address(two), 5301)))
			heard := make(chan string, 100)
			for _, h := range []*netns.Host{one, two} {
				sink(t, h, 5301, heard)
			}
			silent := client(t, lab.Client, netip.AddrPortFrom(netip.MustParseAddr(vip), 53).String())
			send := func() string {
				t.Helper()
				for {
					dropped := netns.Dropped(t)
					must.OK(t, must.Err(silent.Write([]byte("log"))))
					select {
					case who := <-heard:
						return who
					case <-time.After(patience):
					}
					if netns.Dropped(t) == dropped {
						t.Fatal("no endpoint got the datagram, and the kernel has dropped none")
					}
				}
			}
			who := send()
			victim = address(map[string]*netns.Host{"b1": one, "b2": two}[who])
			flood(address(stranger), at(victim, 5301))
			for range 4 {
				check.Equalf(t, send(), who, "who gets the datagrams after forged errors")
			}
			n.stop()
			if ends := n.records.Ends(); len(n.records.All()) != 2 {
				t.Errorf("%d sessions, want 2: %v", len(n.records.All()), ends)
			}
		})
	}
}

// An error without a message, as the kernel sets one if the socket's buffer has no room or
// just after the loop has read the message, neither loses a datagram nor keeps the loop busy.
func TestErrorWithoutAMessage(t *testing.T) {
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	endpoint, stranger := lab.Backends[0], lab.Backends[1]
	endpoint.EchoUDP(t, 5300)
	n.apply(svc("echo", vip4, nil, at(endpoint.IPv4, 5300)))
	c := client(t, lab.Client, vip4+":53")
	askWho(t, c)
	// A long message takes more than the smallest buffer.
	resume := n.stall()
	for _, w := range n.server.workers {
		for _, s := range w.sessions {
			must.OK(t, unix.SetsockoptInt(int(s.socket.fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 0))
		}
	}
	resume()
	local := socketTo(t, lab.Node, at(endpoint.IPv4, 5300))
	refuse := func() {
		t.Helper()
		forgeLong(t, stranger, stranger.IPv4, local, at(endpoint.IPv4, 5300), 1300)
		wait.True(t, "the socket has an error", n.refused)
	}
	n.byHand(func(turn func() int) {
		refuse()
		must.OK(t, must.Err(c.Write([]byte("who"))))
		wait.True(t, "the datagram is sent", func() bool { turn(); return !n.refused() })
	})
	must.OK(t, c.SetReadDeadline(time.Now().Add(patience)))
	must.OK(t, must.Err(c.Read(make([]byte, 100))))

	resume = n.stall()
	refuse()
	resume()
	wait.True(t, "the loop has read the error", func() bool {
		defer n.stall()()
		return !n.refused()
	})
	check.Equalf(t, n.server.Stats().Disbelieved.Load(), 0, "messages that had room")
	check.Equalf(t, n.server.Stats().Lost.Load(), 0, "datagrams lost")
}

// If the endpoint of an answered session is closed, only the datagram that discovers
// this is lost.
func TestClosedEndpointCostsAnAnsweredSessionOneDatagram(t *testing.T) {
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	one, two := lab.Backends[0], lab.Backends[1]
	echo := map[string]*netns.Echo{"b1:5300": one.EchoUDP(t, 5300), "b2:5300": two.EchoUDP(t, 5300)}
	n.apply(svc("dns", vip4, nil, at(one.IPv4, 5300), at(two.IPv4, 5300)))
	c := client(t, lab.Client, vip4+":53")
	who := askWho(t, c)
	echo[who].Close()
	if got, err := ask(c, "lost", 50*time.Millisecond); err == nil {
		t.Fatalf("%s is closed, and %q came back", who, got)
	}
	wait.True(t, "the refusal was read", func() bool {
		found := make(chan bool, loops)
		for i := range loops {
			n.loops[i].Post(func() {
				doubted := false
				for _, s := range n.server.workers[i].sessions {
					doubted = doubted || s.doubted
				}
				found <- doubted
			})
		}
		one, other := <-found, <-found
		return one || other
	})
	if now := askWho(t, c); now == who {
		t.Errorf("%s answers, which is closed", now)
	}
}

// Datagrams that arrive together with the refusal of an earlier one are sent to the
// next endpoint exactly once, even if copies of only some of them fit.
func TestRetrySendsNoDatagramTwice(t *testing.T) {
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	closed, open := lab.Backends[0], lab.Backends[1]
	server := must.Get(open.ListenPacket("udp4", ":5300"))(t)
	defer server.Close()
	must.OK(t, server.(*net.UDPConn).SetReadBuffer(4<<20))
	n.apply(svc("dns", vip4, nil, at(closed.IPv4, 5300), at(open.IPv4, 5300)))
	const burst = 4
	seen, received, buf := make(map[string]int), 0, make([]byte, 1<<16)
	receive := func(within time.Duration) error {
		if err := server.SetReadDeadline(time.Now().Add(within)); err != nil {
			return err
		}
		size, _, err := server.ReadFrom(buf)
		if err != nil {
			return err
		}
		what, _, _ := strings.Cut(string(buf[:size]), " ")
		seen[what]++
		received++
		return nil
	}
	for round := range 2 { // one of the rounds begins with the closed endpoint
		c := client(t, lab.Client, vip4+":53")
		send := func(i int) {
			// The copies of a session hold three of these.
			p := append(fmt.Appendf(nil, "%d/%d ", round, i), make([]byte, 20000)...)
			check.OK(t, must.Err(c.Write(p)))
		}
		n.byHand(func(turn func() (sessions int)) {
			start := turn()
			send(0)
			wait.True(t, "the session begins", func() bool { return turn() > start })
			for i := range burst {
				send(i + 1)
			}
			wait.True(t, "an endpoint refuses or receives", func() bool {
				return n.refused() || receive(time.Millisecond) == nil
			})
			turn()
		})
		for received < (round+1)*(burst+1) {
			if err := receive(patience); err != nil {
				t.Fatalf("%v; so far %v", err, seen)
			}
		}
	}
	for what, times := range seen {
		check.Equalf(t, times, 1, "how often datagram %s came", what)
	}
	if len(seen) != 2*(burst+1) || n.server.Stats().Resent.Load() == 0 {
		t.Errorf("%d datagrams came, %d were sent again", len(seen), n.server.Stats().Resent.Load())
	}
}

// byHand runs a function while the loops pause. turn makes each listening socket receive
// a whole batch, and returns the number of sessions.
func (n *node) byHand(f func(turn func() (sessions int))) {
	n.t.Helper()
	var all []*listener
	for _, l := range n.server.listening {
		all = append(all, l.sockets...)
	}
	over := make(chan struct{})
	still := make(chan struct{})
	for _, l := range n.loops {
		l.Post(func() { still <- struct{}{}; <-over })
	}
	for range n.loops {
		<-still
	}
	defer close(over)
	f(func() (sessions int) {
		if err := n.lab.Node.Do(func() error {
			for _, sh := range all {
				sh.batch = batchSlots
				sh.HandleEvents(0, 0)
			}
			return nil
		}); err != nil {
			n.t.Error(err)
		}
		return int(n.server.Stats().Sessions.Load())
	})
}

// refused reports whether a session's socket has an error that was not read. The loops
// must pause.
func (n *node) refused() bool {
	for _, w := range n.server.workers {
		for _, s := range w.sessions {
			fds := []unix.PollFd{{Fd: s.socket.fd}}
			if _, err := unix.Poll(fds, 0); err == nil && fds[0].Revents&unix.POLLERR != 0 {
				return true
			}
		}
	}
	return false
}

// askWho sends a request and returns the name of the server that answered.
func askWho(t *testing.T, c net.Conn) string {
	t.Helper()
	got := must.Get(ask(c, "who", patience))(t)
	name, _, _ := strings.Cut(got, "\n")
	return name
}

// sink is a server that never answers and reports its name for each datagram.
func sink(t *testing.T, h *netns.Host, port uint16, heard chan<- string) {
	t.Helper()
	pc := must.Get(h.ListenPacket("udp", fmt.Sprintf(":%d", port)))(t)
	t.Cleanup(func() { _ = pc.Close() })
	go func() {
		buf := make([]byte, 100)
		for {
			if _, _, err := pc.ReadFrom(buf); errors.Is(err, net.ErrClosed) {
				return
			} else if err == nil {
				heard <- h.Name()
			}
		}
	}()
}

// socketTo returns the local address of the node's only socket that is connected to an
// endpoint.
func socketTo(t *testing.T, node *netns.Host, endpoint netip.AddrPort) netip.AddrPort {
	t.Helper()
	local, ok := findSocketTo(t, node, endpoint)
	if !ok {
		t.Fatalf("no socket is connected to %s", endpoint)
	}
	return local
}

func findSocketTo(t *testing.T, node *netns.Host, endpoint netip.AddrPort) (local netip.AddrPort, ok bool) {
	t.Helper()
	table := "net/udp"
	if endpoint.Addr().Is6() {
		table += "6"
	}
	for line := range strings.Lines(node.Proc(t, table)) {
		fields := strings.Fields(line)
		if len(fields) > 2 && procAddr(fields[2]) == endpoint {
			return procAddr(fields[1]), true
		}
	}
	return netip.AddrPort{}, false
}

// procAddr reads an address as /proc/net/udp writes it: words in the host's
// order, and a port.
func procAddr(s string) netip.AddrPort {
	address, port, _ := strings.Cut(s, ":")
	var number uint16
	if _, err := fmt.Sscanf(port, "%x", &number); err != nil {
		return netip.AddrPort{}
	}
	var b []byte
	for ; len(address) >= 8; address = address[8:] {
		var word uint32
		if _, err := fmt.Sscanf(address[:8], "%x", &word); err != nil {
			return netip.AddrPort{}
		}
		b = binary.NativeEndian.AppendUint32(b, word)
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.AddrPortFrom(a, number)
}

// unreachables returns how many "destination unreachable" messages a host has
// received.
func unreachables(t *testing.T, h *netns.Host) int {
	t.Helper()
	n := h.Counter(t, "snmp", "Icmp:", "InDestUnreachs")
	for line := range strings.Lines(h.Proc(t, "net/snmp6")) {
		if fields := strings.Fields(line); fields[0] == "Icmp6InDestUnreachs" {
			var n6 int
			_, _ = fmt.Sscan(fields[1], &n6)
			n += n6
		}
	}
	return n
}

// delivered returns how many IPv4 packets have come to sockets of a host.
func delivered(t *testing.T, h *netns.Host) int { return h.Counter(t, "snmp", "Ip:", "InDelivers") }

// forge sends an ICMP message "port unreachable" about a datagram from local to
// endpoint whose content the sender does not know.
func forge(t *testing.T, from *netns.Host, source netip.Addr, local, endpoint netip.AddrPort) {
	t.Helper()
	forgeLong(t, from, source, local, endpoint, 32)
}

// forgeLong is forge about a datagram of so many bytes.
func forgeLong(t *testing.T, from *netns.Host, source netip.Addr, local, endpoint netip.AddrPort, size int) {
	t.Helper()
	udp := make([]byte, 8, 8+size)
	binary.BigEndian.PutUint16(udp[0:], local.Port())
	binary.BigEndian.PutUint16(udp[2:], endpoint.Port())
	binary.BigEndian.PutUint16(udp[4:], uint16(8+size))
	udp = append(udp, bytes.Repeat([]byte{'x'}, size)...)
	message := []byte{3, 3, 0, 0, 0, 0, 0, 0} // type, code, checksum, unused
	protocol, family := syscall.IPPROTO_ICMP, syscall.AF_INET
	to := syscall.Sockaddr(&syscall.SockaddrInet4{Addr: [4]byte(local.Addr().AsSlice()[:4])})
	if local.Addr().Is6() {
		message[0], message[1] = 1, 4
		protocol, family = syscall.IPPROTO_ICMPV6, syscall.AF_INET6
		to = &syscall.SockaddrInet6{Addr: local.Addr().As16()}
	}
	message = append(append(message, ipHeader(local.Addr(), endpoint.Addr(), syscall.IPPROTO_UDP, len(udp))...), udp...)
	if local.Addr().Is4() {
		binary.BigEndian.PutUint16(message[2:], checksum(message))
		message = append(ipHeader(source, local.Addr(), syscall.IPPROTO_ICMP, len(message)), message...)
		protocol = syscall.IPPROTO_RAW
	}
	err := from.Do(func() error {
		fd, err := syscall.Socket(family, syscall.SOCK_RAW|syscall.SOCK_CLOEXEC, protocol)
		if err != nil {
			return err
		}
		defer syscall.Close(fd)
		return syscall.Sendto(fd, message, 0, to)
	})
	must.OK(t, err)
}

func ipHeader(source, to netip.Addr, protocol byte, size int) []byte {
	if source.Is6() {
		h := []byte{0x60, 0, 0, 0, byte(size >> 8), byte(size), protocol, 64}
		return append(append(h, source.AsSlice()...), to.AsSlice()...)
	}
	h := []byte{0x45, 0, byte((20 + size) >> 8), byte(20 + size), 0, 0, 0, 0, 64, protocol, 0, 0}
	h = append(append(h, source.AsSlice()...), to.AsSlice()...)
	binary.BigEndian.PutUint16(h[10:], checksum(h))
	return h
}

func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
