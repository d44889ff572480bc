package sys_test

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// nothing drops every packet.
var nothing = []sys.FilterOp{{Code: sys.FilterReturn}}

// outcome tells what a client's connect comes to: accept, refuse or silence.
// Where silence is wanted it waits for less.
func outcome(t *testing.T, ns *netns.Namespace, addr netip.AddrPort, want string) string {
	t.Helper()
	patience := wait.Patience
	if want == "silence" {
		patience = 300 * time.Millisecond
	}
	c, err := ns.Dialer(&net.Dialer{Timeout: patience}, "tcp", addr.String())
	var timeout net.Error
	switch {
	case err == nil:
		_ = c.Close()
		return "accept"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refuse"
	case errors.As(err, &timeout) && timeout.Timeout():
		return "silence"
	}
	return err.Error()
}

// listenIn is sys.ListenTCP in a namespace; the socket is closed with the test.
func listenIn(t *testing.T, ns *netns.Namespace, addr netip.AddrPort, o sys.ListenOptions) int {
	t.Helper()
	var fd int
	err := ns.Do(func() (err error) {
		fd, err = sys.ListenTCP(addr, o)
		return err
	})
	must.OK(t, err)
	t.Cleanup(func() { sys.Close(fd) })
	return fd
}

// accept waits for a connection: a client has one before its last packet has come.
func accept(t *testing.T, listener int) (fd int) {
	t.Helper()
	wait.True(t, "a connection comes", func() bool {
		var e sys.Errno
		if fd, _, e = sys.Accept(listener); e != 0 && e != sys.EAGAIN {
			t.Fatal(e)
		}
		return e == 0
	})
	t.Cleanup(func() { sys.Close(fd) })
	return fd
}

// TestF5_FilterSilencesTheHandshake and, replaced or detached, lets it be
// answered again.
func TestF5_FilterSilencesTheHandshake(t *testing.T) {
	for _, text := range []string{"127.0.0.1:8080", "[::1]:8080"} {
		ns := netns.New(t, "node")
		addr := netip.MustParseAddrPort(text)
		fd := listenIn(t, ns, addr, sys.ListenOptions{Filter: nothing})
		want := func(want string) {
			t.Helper()
			check.Equalf(t, outcome(t, ns, addr, want), want, "%s", addr)
		}
		want("silence")
		// Only connections to 8080 from that very address, by the IP header.
		load := sys.FilterOp{Code: sys.FilterLoadWord, K: sys.FilterNetwork + 12}
		self := uint32(0x7f000001)
		if addr.Addr().Is6() {
			load.K, self = sys.FilterNetwork+8+12, 1
		}
		only := func(port uint32) []sys.FilterOp {
			return []sys.FilterOp{
				load,
				{Code: sys.FilterIfEqual, Jf: 3, K: self},
				{Code: sys.FilterLoadHalf, K: 2},
				{Code: sys.FilterIfEqual, Jf: 1, K: port},
				{Code: sys.FilterReturn, K: 0xffffffff},
				{Code: sys.FilterReturn},
			}
		}
		must.Equal(t, sys.AttachFilter(fd, only(8080)), 0)
		want("accept")
		must.Equal(t, sys.AttachFilter(fd, only(8081)), 0)
		want("silence")
		must.Equal(t, sys.DetachFilter(fd), 0)
		want("accept")
		check.Equalf(t, sys.DetachFilter(fd), syscall.ENOENT, "a second detach")
	}
}

// TestAcceptedSocketsInheritTheFilter, which is why it is detached from them.
func TestAcceptedSocketsInheritTheFilter(t *testing.T) {
	ns := netns.New(t, "node")
	addr := netip.MustParseAddrPort("127.0.0.1:8080")
	all := []sys.FilterOp{{Code: sys.FilterReturn, K: 0xffffffff}}
	listener := listenIn(t, ns, addr, sys.ListenOptions{Filter: all})
	ns.Connect(t, "tcp", addr.String())
	check.Equalf(t, sys.DetachFilter(accept(t, listener)), 0, "detach from an accepted socket")
	check.Equalf(t, sys.AttachFilter(listener, nil), sys.EINVAL, "an empty program")
	check.Equalf(t, sys.AttachFilter(listener, make([]sys.FilterOp, sys.MaxFilterOps+1)), sys.EINVAL, "a program that is too long")
}

// TestRefusingHoldsThePort: refused, and nobody else's; connections go on, and
// another socket can take the place.
func TestRefusingHoldsThePort(t *testing.T) {
	for how, refuse := range map[string]func(int) sys.Errno{"hide": sys.Hide, "stop": sys.StopListening} {
		for _, host := range []string{"127.0.0.1", "::1"} {
			ns := netns.New(t, "node")
			addr := netip.AddrPortFrom(netip.MustParseAddr(host), 8080)
			options := sys.ListenOptions{FreeBind: true}
			fd := listenIn(t, ns, addr, options)
			client := must.Get(ns.Dial("tcp", addr.String()))(t)
			defer client.Close()
			conn := accept(t, fd)
			var old []int
			for range 3 {
				must.Equal(t, refuse(fd), 0)
				old = append(old, fd)
				check.Equalf(t, outcome(t, ns, addr, "refuse"), "refuse", "%s %s", how, addr)
				// net.Listen sets SO_REUSEADDR, as most servers do.
				for _, other := range []string{addr.String(), fmt.Sprintf(":%d", addr.Port())} {
					l, err := ns.Listen("tcp", other)
					check.ErrorIsf(t, err, syscall.EADDRINUSE, "%s %s: another program listens on %s", how, addr, other)
					if err == nil {
						_ = l.Close()
					}
				}
				err := ns.Do(func() (err error) {
					fd, err = sys.ListenInPlaceOf(old, addr, options)
					return err
				})
				must.OKf(t, err, "%s", how)
				t.Cleanup(func() { sys.Close(fd) })
				check.Equalf(t, outcome(t, ns, addr, "accept"), "accept", "%s %s", how, addr)
			}
			check.OK(t, must.Err(client.Write([]byte("x"))))
			buf := make([]byte, 1)
			deadline := time.Now().Add(20 * time.Second)
			n, e := sys.Recv(conn, buf)
			for e == sys.EAGAIN && time.Now().Before(deadline) {
				n, e = sys.Recv(conn, buf)
			}
			if n != 1 || e != 0 {
				t.Errorf("%s: the connection from before: %d, %v", how, n, e)
			}
		}
	}
}

// TestHideCompletesHandshakes that have begun: the client's own answer, which a
// filter holds back here, comes when its data does.
func TestHideCompletesHandshakes(t *testing.T) {
	openingOnly := []sys.FilterOp{
		{Code: sys.FilterLoadWord, K: 12}, // of the TCP header: the flags are in its second byte
		{Code: syscall.BPF_ALU | syscall.BPF_AND | syscall.BPF_K, K: 0x00020000},
		{Code: syscall.BPF_RET | syscall.BPF_A},
	}
	for _, host := range []string{"127.0.0.1", "::1"} {
		ns := netns.New(t, "node")
		addr := netip.AddrPortFrom(netip.MustParseAddr(host), 8080)
		fd := listenIn(t, ns, addr, sys.ListenOptions{Filter: openingOnly})
		client := ns.Connect(t, "tcp", addr.String())
		if _, _, e := sys.Accept(fd); e != sys.EAGAIN {
			t.Fatalf("the handshake is over: %v", e)
		}
		must.Equal(t, sys.Hide(fd), 0)
		must.Equal(t, sys.DetachFilter(fd), 0)
		check.Equalf(t, outcome(t, ns, addr, "refuse"), "refuse", "%s", addr)
		must.OK(t, must.Err(client.Write([]byte("x"))))
		deadline := time.Now().Add(20 * time.Second)
		conn, _, e := sys.Accept(fd)
		for e == sys.EAGAIN && time.Now().Before(deadline) {
			conn, _, e = sys.Accept(fd)
		}
		must.Equalf(t, e, 0, "%s", addr)
		sys.Close(conn)
	}
}

// TestLetGoLeavesThePort to who wants it, from either state.
func TestLetGoLeavesThePort(t *testing.T) {
	for _, stopped := range []bool{false, true} {
		ns := netns.New(t, "node")
		addr := netip.MustParseAddrPort("127.0.0.1:8080")
		fd := listenIn(t, ns, addr, sys.ListenOptions{FreeBind: true})
		if stopped {
			must.Equal(t, sys.StopListening(fd), 0)
		}
		must.Equal(t, sys.LetGo(fd), 0)
		check.Equalf(t, outcome(t, ns, addr, "refuse"), "refuse", "stopped %t", stopped)
		listenIn(t, ns, addr, sys.ListenOptions{FreeBind: true})
		check.Equalf(t, outcome(t, ns, addr, "accept"), "accept", "stopped %t: how many by the next listener", stopped)
	}
}
