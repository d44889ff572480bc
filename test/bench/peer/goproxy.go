package peer

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// GoProxyRole is the argument that makes this program the plain Go proxy.
const GoProxyRole = "@goproxy"

// GoProxySpec describes the plain Go proxy.
type GoProxySpec struct {
	Listen    netip.Addr
	Ports     []uint16
	Endpoints []netip.Addr
}

// RunGoProxy is the proxy that a good Go programmer writes in an afternoon: a
// goroutine for each direction, io.Copy, half-closes passed on. It runs until the
// process is killed.
func RunGoProxy(spec GoProxySpec) error {
	lc := net.ListenConfig{Control: transparent}
	// A Go listener uses MPTCP by default, which would be a handicap.
	lc.SetMultipathTCP(false)
	failed := make(chan error)
	for _, port := range spec.Ports {
		l, err := lc.Listen(context.Background(), "tcp", netip.AddrPortFrom(spec.Listen, port).String())
		if err != nil {
			return fmt.Errorf("goproxy: %w", err)
		}
		go func() { failed <- acceptAll(l, port, spec.Endpoints) }()
	}
	return <-failed
}

// transparent lets TPROXY steer to the socket.
func transparent(network, _ string, c syscall.RawConn) error {
	level, name := unix.SOL_IP, unix.IP_TRANSPARENT
	if network == "tcp6" {
		level, name = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	var err error
	if e := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, name, 1) }); e != nil {
		return e
	}
	return err
}

func acceptAll(l net.Listener, port uint16, endpoints []netip.Addr) error {
	var turn atomic.Uint32
	for {
		conn, err := l.Accept()
		if err != nil {
			return fmt.Errorf("goproxy: %w", err)
		}
		endpoint := endpoints[int(turn.Add(1))%len(endpoints)]
		go relay(conn.(*net.TCPConn), netip.AddrPortFrom(endpoint, port))
	}
}

func relay(client *net.TCPConn, endpoint netip.AddrPort) {
	defer client.Close()
	server, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(endpoint))
	if err != nil {
		return
	}
	defer server.Close()
	done := make(chan struct{})
	go func() {
		move(server, client)
		close(done)
	}()
	move(client, server)
	<-done
}

// move copies one direction to its end and passes the end on. An error ends the
// connection in any case: the other direction gets it too.
func move(to, from *net.TCPConn) {
	if _, err := io.Copy(to, from); err != nil {
		_ = from.Close()
		_ = to.Close()
		return
	}
	_ = to.CloseWrite()
}
