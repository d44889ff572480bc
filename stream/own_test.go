package stream

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// An endpoint on this node whose server is down, with a port that the kernel
// may choose for the socket that connects: TCP would connect that socket to
// itself, the client would get its own bytes, and the server could not bind.
func TestEndpointOnThisNodeIsNeverTheProxyItself(t *testing.T) {
	netns.Require(t)
	for _, family := range []string{"IPv4", "IPv6"} {
		t.Run(family, func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 0)
			// The kernel tries the ports at even distances first.
			must.OK(t, lab.Node.SetSysctl("net/ipv4/ip_local_port_range", "40000 40007"))
			own, vip := netip.AddrPortFrom(lab.Node.IPv4, 40002), "10.96.0.1"
			if family == "IPv6" {
				own, vip = netip.AddrPortFrom(lab.Node.IPv6, 40002), "fd00:96::1"
			}
			n := newNode(t, lab, func(o *setup) {
				o.HostAddresses = func() []netip.Addr { return []netip.Addr{lab.Node.IPv4, lab.Node.IPv6} }
				o.Balancer.Plan = balancer.DefaultPlan() // gives up before the clients do
			})
			n.apply(web("down", vip, own))

			done := make(chan struct{})
			var server sync.WaitGroup
			server.Go(func() { bindAgainAndAgain(t, lab.Node, own, done) })
			var clients sync.WaitGroup
			for range 64 {
				clients.Go(func() { wantNoEcho(t, lab.Client, net.JoinHostPort(vip, "80")) })
			}
			clients.Wait()
			close(done)
			server.Wait()
		})
	}
}

// bindAgainAndAgain is a server that tries to start and gives up at once.
func bindAgainAndAgain(t *testing.T, on *netns.Host, at netip.AddrPort, done <-chan struct{}) {
	for {
		select {
		case <-done:
			return
		case <-time.After(time.Millisecond):
		}
		fd, err := bindOnly(on, at)
		if err != nil {
			t.Errorf("the server cannot bind %s: %v", at, err)
			return
		}
		_ = syscall.Close(fd)
	}
}

// bindOnly binds as servers do, and does not listen.
func bindOnly(on *netns.Host, at netip.AddrPort) (fd int, err error) {
	family, to := syscall.AF_INET, syscall.Sockaddr(&syscall.SockaddrInet4{Port: int(at.Port()), Addr: [4]byte(at.Addr().AsSlice()[:4])})
	if at.Addr().Is6() {
		family, to = syscall.AF_INET6, &syscall.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
	}
	err = on.Do(func() error {
		if fd, err = syscall.Socket(family, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		if err = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err == nil {
			err = syscall.Bind(fd, to)
		}
		if err != nil {
			_ = syscall.Close(fd)
		}
		return err
	})
	return fd, err
}

// wantNoEcho connects and wants to get nothing but the end.
func wantNoEcho(t *testing.T, from *netns.Host, address string) {
	c, err := from.Dial("tcp", address)
	if err != nil {
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	_, _ = io.WriteString(c, "hello\n")
	got := make([]byte, 16)
	if n, err := c.Read(got); n > 0 || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the client got %q, %v", got[:n], err)
	}
}
