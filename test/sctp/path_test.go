package sctp

import (
	"encoding/binary"
	"net"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// A client with two addresses keeps its association when the path of one is cut.
func TestPathOfAClientIsCut(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	netns.Wire(t, lab.Node.Namespace, "second", []netip.Prefix{netip.MustParsePrefix("10.1.5.1/24")},
		lab.Client.Namespace, "eth1", []netip.Prefix{netip.MustParsePrefix("10.1.5.2/24")})
	_, services, _ := net.ParseCIDR("10.96.0.0/16")
	must.OK(t, lab.Client.Netlink().RouteAdd(&netlink.Route{Dst: services, Gw: net.ParseIP("10.1.5.1"), Priority: 2000}))
	_, whole, _ := net.ParseCIDR("10.96.0.0/16")
	must.OK(t, lab.Client.Netlink().RouteAdd(&netlink.Route{Dst: whole, Gw: net.ParseIP("10.1.0.1"), Priority: 1000}))
	serve(t, b.Namespace, at(b), options(), echo)
	startProxy(t, lab.Node.Namespace, manifest(svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}}))
	p := twoAddresses(t, lab.Client.Namespace, "10.1.0.2", "10.1.5.2", "10.96.0.10")
	defer p.abort()
	talk(t, p, "by the first path")
	must.OK(t, lab.Client.SetDown("eth0"))
	began := time.Now()
	must.OK(t, p.send(note{text: []byte("by the second path")}))
	// Both sides retransmit before they take the other path, some 7 s in all.
	must.OKf(t, must.Err(p.receiveIn(3*patience)), "by the second path")
	t.Logf("the second path was in use after %v", time.Since(began))
	talk(t, p, "and again")
}

// twoAddresses connects a socket that is bound to two addresses.
func twoAddresses(t *testing.T, in *netns.Namespace, first, second, to string) *peer {
	t.Helper()
	var fd int
	err := in.Do(func() (err error) {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP); err != nil {
			return err
		}
		const noDelay, receiveInfo, bindAdd = 3, 32, 100
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_SCTP, noDelay, 1)
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_SCTP, receiveInfo, 1)
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: netip.MustParseAddr(first).As4()}); err != nil {
			return err
		}
		local, err := unix.Getsockname(fd)
		if err != nil {
			return err
		}
		var raw [unix.SizeofSockaddrInet4]byte
		binary.NativeEndian.PutUint16(raw[0:], unix.AF_INET)
		binary.BigEndian.PutUint16(raw[2:], uint16(local.(*unix.SockaddrInet4).Port))
		a := netip.MustParseAddr(second).As4()
		copy(raw[4:], a[:])
		if _, _, e := unix.Syscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.IPPROTO_SCTP, bindAdd, uintptr(unsafe.Pointer(&raw)), uintptr(len(raw)), 0); e != 0 {
			return e
		}
		err = unix.Connect(fd, &unix.SockaddrInet4{Addr: netip.MustParseAddr(to).As4(), Port: port})
		if err == unix.EINPROGRESS {
			err = nil
		}
		return err
	})
	must.OK(t, err)
	p := newPeer(fd)
	wait.For(t, "connected", patience, func() error {
		if !p.poll(unix.POLLOUT, time.Second) {
			return sys.EAGAIN
		}
		return nil
	})
	return p
}
