package netns

import (
	"fmt"
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/must"
)

// Tun is an interface without a link header whose packets the test itself sends and
// receives: what is written to it arrives at the namespace, and what the namespace routes
// to it is read. It stands for any number of hosts.
func (n *Namespace) Tun(t testing.TB, name string, routes ...netip.Prefix) *os.File {
	t.Helper()
	var f *os.File
	err := n.Do(func() (err error) {
		f, err = openTun(name)
		return err
	})
	must.OK(t, err)
	t.Cleanup(func() { _ = f.Close() })
	l, err := n.nl.LinkByName(name)
	if err == nil {
		err = n.nl.LinkSetTxQLen(l, 1<<14)
	}
	if err == nil {
		err = n.nl.LinkSetUp(l)
	}
	for _, r := range routes {
		if err == nil {
			err = n.nl.RouteAdd(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: ipNet(r), Scope: netlink.SCOPE_LINK})
		}
	}
	must.OKf(t, err, "%s", name)
	return f
}

func openTun(name string) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	request, err := unix.NewIfreq(name)
	if err != nil {
		return nil, err
	}
	request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		_ = unix.Close(fd)
		return nil, fmt.Errorf("TUNSETIFF: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}
