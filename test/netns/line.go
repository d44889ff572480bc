package netns

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/must"
)

// Line describes a bad link: chances per thousand for each packet.
type Line struct {
	Loss, Duplicate, Reorder int
	Delay                    time.Duration // maximum delay of a reordered packet
	MTU                      int
	Seed                     uint64
}

// AddFarHost connects a host to the node by a bad link: a TUN interface at each
// end, and this process between them. Number is 1 to 250; its addresses are
// 10.3.NUMBER.2 and fd00:3:NUMBER::2. The kernel needs no netem.
func (lab *Lab) AddFarHost(t testing.TB, name string, number int, line Line) *Host {
	t.Helper()
	h := &Host{
		Namespace: New(t, name),
		IPv4:      netip.AddrFrom4([4]byte{10, 3, byte(number), 2}),
		IPv6:      netip.MustParseAddr(fmt.Sprintf("fd00:3:%x::2", number)),
	}
	gw4, gw6 := netip.AddrFrom4([4]byte{10, 3, byte(number), 1}), netip.MustParseAddr(fmt.Sprintf("fd00:3:%x::1", number))
	near := lab.Node.tun(t, name, line.MTU, netip.PrefixFrom(gw4, 24), netip.PrefixFrom(gw6, 64))
	far := h.tun(t, "eth0", line.MTU, netip.PrefixFrom(h.IPv4, 24), netip.PrefixFrom(h.IPv6, 64))
	for _, gw := range []netip.Addr{gw4, gw6} {
		must.OKf(t, h.AddRoute(netip.PrefixFrom(zero(gw), 0), gw), "%s: default route via %s", name, gw)
	}
	go line.carry(near, far, rand.New(rand.NewPCG(line.Seed, 1)))
	go line.carry(far, near, rand.New(rand.NewPCG(line.Seed, 2)))
	return h
}

// tun creates a TUN interface that is up and has the addresses. It is removed with
// the test.
func (n *Namespace) tun(t testing.TB, ifname string, mtu int, addrs ...netip.Prefix) *os.File {
	t.Helper()
	var file *os.File
	err := n.Do(func() error {
		request, err := unix.NewIfreq(ifname)
		if err != nil {
			return err
		}
		request.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI)
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return fmt.Errorf("/dev/net/tun: %w", err)
		}
		if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
			_ = unix.Close(fd)
			return fmt.Errorf("TUNSETIFF: %w", err)
		}
		file = os.NewFile(uintptr(fd), ifname)
		return nil
	})
	if err == nil {
		t.Cleanup(func() { _ = file.Close() })
		link, linkErr := n.nl.LinkByName(ifname)
		if err = linkErr; err == nil {
			err = n.nl.LinkSetMTU(link, mtu)
		}
	}
	if err == nil {
		err = n.configure(ifname, addrs)
	}
	switch {
	case err == nil:
	case file == nil && os.Getenv(requireEnv) != "1":
		t.Skipf("SKIP-NEEDS: TUN interfaces: %v", err)
	default:
		t.Fatalf("%s: %s: %v", n.name, ifname, err)
	}
	return file
}

// carry moves packets in one direction until an end is closed.
func (l Line) carry(from, to *os.File, r *rand.Rand) {
	buf := make([]byte, 65536)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return
		}
		packet := buf[:n]
		if r.IntN(1000) < l.Loss && !resets(packet) {
			continue
		}
		copies := 1
		if r.IntN(1000) < l.Duplicate {
			copies = 2
		}
		for range copies {
			if l.Delay > 0 && r.IntN(1000) < l.Reorder {
				late := append([]byte(nil), packet...)
				time.AfterFunc(time.Duration(r.Int64N(int64(l.Delay))), func() { _, _ = to.Write(late) })
				continue
			}
			_, _ = to.Write(packet) // a full interface drops it
		}
	}
}

// resets tells whether a packet is a TCP reset. TCP does not repeat resets, so a
// lost one leaves a connection open until keepalive probes it.
func resets(packet []byte) bool {
	const tcp, rst = 6, 0x04
	header := 40
	switch {
	case len(packet) < 40:
		return false
	case packet[0]>>4 == 4 && packet[9] == tcp:
		header = int(packet[0]&0xf) * 4
	case packet[0]>>4 != 6 || packet[6] != tcp:
		return false
	}
	return len(packet) > header+13 && packet[header+13]&rst != 0
}
