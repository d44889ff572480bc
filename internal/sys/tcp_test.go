package sys

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// listen makes a listening socket on a free port and returns its address.
func listen(t testing.TB, on string, o ListenOptions) (int, netip.AddrPort) {
	t.Helper()
	fd := must.Get(ListenTCP(netip.AddrPortFrom(netip.MustParseAddr(on), 0), o))(t)
	t.Cleanup(func() { Close(fd) })
	addr, e := LocalAddr(fd)
	must.Equal(t, e, 0)
	return fd, addr
}

// until waits for events on a descriptor.
func until(t testing.TB, fd int, events int16) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for time.Now().Before(deadline) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: events}}
		if n, err := unix.Poll(fds, 1000); n == 1 {
			return
		} else if err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
	}
	t.Fatalf("descriptor %d: nothing happened", fd)
}

// connected makes a connection: the socket that connected and the accepted one.
func connected(t testing.TB, listener int, addr netip.AddrPort) (a, b int) {
	t.Helper()
	a, e := ConnectTCP(addr, netip.AddrPort{}, ConnectOptions{})
	if a < 0 {
		t.Fatal(e)
	}
	t.Cleanup(func() { Close(a) })
	until(t, a, unix.POLLOUT)
	until(t, listener, unix.POLLIN)
	b, from, e := AcceptTCP(listener)
	must.Equal(t, e, 0)
	t.Cleanup(func() { Close(b) })
	if own, e := LocalAddr(a); e != 0 || own != from {
		t.Fatalf("accepted from %v, connected from %v, %v", from, own, e)
	}
	return a, b
}

func option(t testing.TB, fd, level, name int) int {
	t.Helper()
	v, e := getInt(fd, level, name)
	must.Equal(t, e, 0)
	return v
}

func TestConnection(t *testing.T) {
	for _, on := range []string{"127.0.0.1", "::1"} {
		t.Run(on, func(t *testing.T) {
			l, addr := listen(t, on, ListenOptions{})
			if addr.Addr().String() != on || addr.Port() == 0 {
				t.Fatalf("listens at %v", addr)
			}
			a, b := connected(t, l, addr)
			must.Equal(t, ConnectResult(a), 0)
			if own, e := LocalAddr(b); e != 0 || own != addr {
				t.Fatalf("connected to %v, %v", own, e)
			}
			buf := make([]byte, 10)
			if _, e := Recv(b, buf); e != EAGAIN {
				t.Fatalf("an empty socket: %v", e)
			}
			if n, e := Send(a, []byte("hello"), false); n != 5 || e != 0 {
				t.Fatal(n, e)
			}
			until(t, b, unix.POLLIN)
			if n, e := Recv(b, buf); n != 5 || e != 0 || string(buf[:n]) != "hello" {
				t.Fatal(n, e)
			}
			must.Equal(t, ShutdownWrite(a), 0)
			until(t, b, unix.POLLRDHUP)
			if n, e := Recv(b, buf); n != 0 || e != 0 {
				t.Fatal(n, e)
			}
			// The reset of one side is an error at the other, once.
			Close(b)
			until(t, a, unix.POLLERR)
			must.Equal(t, SocketError(a), ECONNRESET)
			must.Equal(t, SocketError(a), 0)
			if n, e := Send(a, []byte("x"), false); n != -1 || e != EPIPE {
				t.Fatal(n, e)
			}
		})
	}
}

// TestLocalAddress: an address alone shares its ports among remote addresses; an
// address with a port is taken as it is.
func TestLocalAddress(t *testing.T) {
	for _, on := range []string{"127.0.0.1", "::1"} {
		_, addr := listen(t, on, ListenOptions{})
		a, e := ConnectTCP(addr, netip.AddrPortFrom(addr.Addr(), 0), ConnectOptions{})
		if a < 0 {
			t.Fatal(e)
		}
		defer Close(a)
		own, _ := LocalAddr(a)
		if option(t, a, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT) != 1 || own.Port() == 0 {
			t.Fatalf("connected from %v", own)
		}
		if b, e := ConnectTCP(addr, own, ConnectOptions{}); e != EADDRNOTAVAIL && e != EADDRINUSE {
			t.Fatalf("two connections from %v to %v: %d, %v", own, addr, b, e)
		}
		_, other := listen(t, on, ListenOptions{})
		anyAddr := netip.IPv4Unspecified()
		if addr.Addr().Is6() {
			anyAddr = netip.IPv6Unspecified()
		}
		port := sparePort(t)
		for _, to := range []netip.AddrPort{addr, other} {
			fd, e := ConnectTCP(to, netip.AddrPortFrom(anyAddr, port), ConnectOptions{})
			if fd < 0 {
				t.Fatal(e)
			}
			defer Close(fd)
			if own, _ := LocalAddr(fd); own.Port() != port {
				t.Fatalf("connected from %v", own)
			}
		}
	}
}

// sparePort returns a port that the kernel does not give away by itself.
func sparePort(t *testing.T) uint16 {
	_, last, err := LocalPortRange()
	must.OK(t, err)
	if last > 65000 {
		t.Skip("SKIP-NEEDS: a port outside of the kernel's range")
	}
	return last + 77
}

// nobody is an address that no test listens on. The kernel may give a port that was just
// closed to somebody else.
var nobody = netip.MustParseAddrPort("127.0.0.83:9")

func TestRefused(t *testing.T) {
	fd, e := ConnectTCP(nobody, netip.AddrPort{}, ConnectOptions{})
	if e == EINPROGRESS {
		until(t, fd, unix.POLLOUT)
		e = ConnectResult(fd)
		Close(fd)
	}
	must.Equal(t, e, ECONNREFUSED)
}

// TestInProgress: a connect that nobody answers is neither done nor failed.
func TestInProgress(t *testing.T) {
	l, addr := listen(t, "127.0.0.1", ListenOptions{Backlog: 1})
	var last int
	for i := range 3 {
		if i == 2 {
			wait.True(t, "the queue of two is full", func() bool {
				info, err := unix.GetsockoptTCPInfo(l, unix.IPPROTO_TCP, unix.TCP_INFO)
				return err == nil && info.Unacked == 2 // of a listening socket: connections in its queue
			})
		}
		fd, e := ConnectTCP(addr, netip.AddrPort{}, ConnectOptions{})
		if fd < 0 {
			t.Fatal(e)
		}
		defer Close(fd)
		last = fd
	}
	must.Equal(t, ConnectResult(last), EAGAIN)
	if _, e := Send(last, []byte("x"), false); e != EAGAIN {
		t.Fatal(e)
	}
}

// TestInherited: what an accepted socket needs is set on the listener.
func TestInherited(t *testing.T) {
	live := Liveness{Idle: 61 * time.Second, Interval: 1500 * time.Millisecond, Count: 4, UserTimeout: 91 * time.Second}
	l, addr := listen(t, "127.0.0.1", ListenOptions{Liveness: live, ReusePort: true, FreeBind: true})
	a, b := connected(t, l, addr)
	check := func(fd int) {
		t.Helper()
		for _, o := range []struct{ level, name, want int }{
			{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
			{unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
			{unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 61},
			{unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 2}, // rounded up
			{unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 4},
			{unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 91000},
		} {
			check.Equalf(t, option(t, fd, o.level, o.name), o.want, "option %d/%d", o.level, o.name)
		}
		if flags, _ := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); flags&unix.O_NONBLOCK == 0 {
			t.Error("it blocks")
		}
		if flags, _ := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); flags&unix.FD_CLOEXEC == 0 {
			t.Error("it is not close-on-exec")
		}
	}
	check(b)
	if option(t, a, unix.SOL_SOCKET, unix.SO_KEEPALIVE) != 0 || option(t, a, unix.IPPROTO_TCP, unix.TCP_NODELAY) != 0 {
		t.Error("the connecting side should have neither TCP_NODELAY nor keepalive yet")
	}
	must.Equal(t, SetLiveness(a, live), 0)
	must.Equal(t, SetNoDelay(a), 0)
	check(a)
	if got := option(t, l, unix.SOL_SOCKET, unix.SO_PROTOCOL); got != unix.IPPROTO_TCP {
		t.Errorf("protocol %d: not plain TCP", got)
	}
}

func TestListenSaysWhatIsWrong(t *testing.T) {
	_, addr := listen(t, "127.0.0.1", ListenOptions{})
	_, err := ListenTCP(addr, ListenOptions{})
	if !errors.Is(err, EADDRINUSE) || err.Error() != "listen "+addr.String()+": bind: address already in use" {
		t.Fatal(err)
	}
	if _, err := ListenTCP(netip.MustParseAddrPort("192.0.2.1:80"), ListenOptions{}); !errors.Is(err, EADDRNOTAVAIL) {
		t.Fatal(err)
	}
	fd := must.Get(ListenTCP(netip.MustParseAddrPort("192.0.2.1:80"), ListenOptions{FreeBind: true}))(t)
	Close(fd)
}

func TestTransparent(t *testing.T) {
	for _, on := range []string{"192.0.2.1:80", "[2001:db8::1]:80"} {
		fd, err := ListenTCP(netip.MustParseAddrPort(on), ListenOptions{Transparent: true})
		if errors.Is(err, EPERM) {
			t.Skip("SKIP-NEEDS: CAP_NET_ADMIN")
		}
		must.OK(t, err)
		Close(fd)
	}
	l, addr := listen(t, "127.0.0.1", ListenOptions{})
	// A local address that is no interface's, with any port.
	fd, e := ConnectTCP(addr, netip.MustParseAddrPort("127.3.2.1:0"), ConnectOptions{Transparent: true})
	if fd < 0 {
		t.Fatal(e)
	}
	defer Close(fd)
	until(t, l, unix.POLLIN)
	b, from, e := Accept(l)
	if e != 0 || from.Addr() != netip.MustParseAddr("127.3.2.1") {
		t.Fatal(from, e)
	}
	Close(b)
}

func TestUrgentByteStaysInTheStream(t *testing.T) {
	l, addr := listen(t, "127.0.0.1", ListenOptions{})
	a, b := connected(t, l, addr)
	testUrgent(t, a, b)
	testUrgent(t, b, a)
}

func testUrgent(t *testing.T, a, b int) {
	t.Helper()
	must.OK(t, unix.Sendto(a, []byte("one!"), unix.MSG_OOB, nil))
	until(t, b, unix.POLLPRI)
	var got []byte
	buf := make([]byte, 10)
	for {
		n, e := Recv(b, buf)
		if e != 0 {
			break
		}
		got = append(got, buf[:n]...)
	}
	must.Equalf(t, string(got), "one!", "%q", got)
}

func TestPipe(t *testing.T) {
	l, addr := listen(t, "127.0.0.1", ListenOptions{})
	a, b := connected(t, l, addr)
	r, w, e := Pipe()
	must.Equal(t, e, 0)
	defer Close(r)
	defer Close(w)
	size, e := SetPipeSize(w, 100<<10)
	if e != 0 || size != 128<<10 {
		t.Fatal(size, e)
	}
	if got, err := unix.FcntlInt(uintptr(r), unix.F_GETPIPE_SZ, 0); err != nil || got != size {
		t.Fatal(got, err)
	}
	if _, e := Splice(b, w, size); e != EAGAIN {
		t.Fatal(e)
	}
	Send(a, []byte("through the pipe"), false)
	until(t, b, unix.POLLIN)
	if n, e := Splice(b, w, size); n != 16 || e != 0 {
		t.Fatal(n, e)
	}
	if n, e := Splice(r, b, 16); n != 16 || e != 0 {
		t.Fatal(n, e)
	}
	until(t, a, unix.POLLIN)
	buf := make([]byte, 20)
	if n, e := Recv(a, buf); e != 0 || string(buf[:n]) != "through the pipe" {
		t.Fatal(n, e)
	}
	ShutdownWrite(a)
	until(t, b, unix.POLLRDHUP)
	if n, e := Splice(b, w, size); n != 0 || e != 0 {
		t.Fatal(n, e)
	}
}

func TestFileLimit(t *testing.T) {
	now, most, err := FileLimit()
	if err != nil || now == 0 || now > most {
		t.Fatal(now, most, err)
	}
	if got, err := RaiseFileLimit(); err != nil || got != most {
		t.Fatal(got, err)
	}
}

func TestNoAllocation(t *testing.T) {
	l, addr := listen(t, "::1", ListenOptions{})
	buf := make([]byte, 10)
	out := []byte("hello")
	incoming := []unix.PollFd{{Fd: int32(l), Events: unix.POLLIN}}
	if n := testing.AllocsPerRun(100, func() {
		a, _ := ConnectTCP(addr, netip.AddrPort{}, ConnectOptions{})
		ConnectResult(a)
		for n := 0; n < 1; n, _ = unix.Poll(incoming, 20_000) { // again after a signal
		}
		b, _, e := Accept(l)
		must.Equal(t, e, 0)
		LocalAddr(b)
		Send(a, out, false)
		Recv(b, buf)
		CloseInOrder(a)
		Close(b)
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

// TestGrownReceiveBufferOpensTheWindow: the peer may send more than fits in the small buffer that
// a connection begins with.
func TestGrownReceiveBufferOpensTheWindow(t *testing.T) {
	l, addr := listen(t, "127.0.0.1", ListenOptions{})
	a, b := connected(t, l, addr)
	t.Run("connected", func(t *testing.T) { testWindowOpens(t, a, b) })
	a, b = connected(t, l, addr)
	t.Run("accepted", func(t *testing.T) { testWindowOpens(t, b, a) })
}

// testWindowOpens: a begins with the small receive buffer. Once that has grown, its peer b sees a
// larger window.
func testWindowOpens(t *testing.T, a, b int) {
	if n := option(t, a, unix.SOL_SOCKET, unix.SO_RCVBUF); n > ReceiveBuffer {
		t.Errorf("its receive buffer has %d bytes", n)
	}
	GrowReceiveBuffer(a, 2<<20)
	if option(t, a, unix.SOL_SOCKET, unix.SO_RCVBUF) < 2<<20 {
		t.Skip("SKIP-NEEDS: CAP_NET_ADMIN, or a larger net.core.rmem_max")
	}
	chunk := make([]byte, 256<<10)
	most := uint32(0)
	wait.For(t, "the peer sees a larger window", wait.Patience, func() error {
		_, _ = unix.Write(b, chunk)
		for n := 1; n > 0; {
			n, _ = unix.Read(a, chunk)
		}
		if p, e := PeerOf(b); e == 0 {
			most = max(most, p.Window)
		}
		if most <= 2*ReceiveBuffer {
			return fmt.Errorf("at most %d bytes so far", most)
		}
		return nil
	})
}
