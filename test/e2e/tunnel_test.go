package e2e

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// tunnelled is the size of the datagrams of a WireGuard tunnel with packets of
// Ethernet's MTU.
const tunnelled = 1420

// TestTunnelsKeepTheirDatagrams sends a stream of datagrams, as a tunnel does, one
// by one and in GSO batches (UDP_SEGMENT), never more than the queues hold. Each
// must arrive alone, whole, in order and once, and so must the answers.
func TestTunnelsKeepTheirDatagrams(t *testing.T) {
	t.Parallel()
	datagrams := 6400
	if full() {
		datagrams = 640000
	}
	lab := netns.NewLab(t, 1)
	back := lab.Backends[0]
	reflector(t, back, 9000)
	p := newProxy(t, lab.Node)
	p.relayed = "sessions that begin with a GSO batch"
	p.put(&object{
		name: "tunnel", kind: corev1.ServiceTypeClusterIP, vips: []string{vip4, vip6}, port: 1000, target: 9000,
		protocol: corev1.ProtocolUDP, endpoints: []endpoint{{host: back, node: "elsewhere"}},
	})
	p.start()
	for _, vip := range []string{vip4, vip6} {
		to := netip.AddrPortFrom(netip.MustParseAddr(vip), 1000)
		for _, gso := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s gso=%v", vip, gso), func(t *testing.T) {
				began := time.Now()
				must.OK(t, lab.Client.Do(func() error { return tunnel(to, datagrams, gso) }))
				t.Logf("%d datagrams there and back in %v", datagrams, time.Since(began))
			})
		}
	}
	p.stop()
}

// tunnel sends datagrams in bursts of 32 and expects each burst back before the
// next.
func tunnel(to netip.AddrPort, datagrams int, gso bool) error {
	fd, errno := sys.UDPSocket(to.Addr().Is6())
	if errno != 0 {
		return errno
	}
	defer sys.Close(fd)
	if errno := sys.ConnectUDP(fd, to, netip.AddrPort{}); errno != 0 {
		return errno
	}
	const burst = 32
	out, in := sys.NewOutbox(burst), sys.NewInbox(burst)
	data := make([]byte, burst*tunnelled)
	for first := 0; first < datagrams; first += burst {
		for i := range burst {
			p := data[i*tunnelled:][:tunnelled]
			binary.BigEndian.PutUint64(p, uint64(first+i))
			p[tunnelled-1] = byte(i)
			out.Append(netip.AddrPort{}, p, 0, gso)
		}
		if errno := out.Send(fd); errno != 0 {
			return fmt.Errorf("datagram %d: %w", first, errno)
		}
		got := 0
		for deadline := time.Now().Add(startTimeout); got < burst; {
			n, errno := in.Receive(fd, 0, burst)
			if errno == sys.EAGAIN && time.Now().Before(deadline) {
				_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 1000)
				continue
			}
			if errno != 0 {
				return fmt.Errorf("after %d datagrams: %w", first+got, errno)
			}
			for i := range n {
				if want := data[got*tunnelled:][:tunnelled]; got >= burst || !slices.Equal(in.Data(i), want) {
					return fmt.Errorf("datagram %d came back otherwise, with %d bytes", first+got, len(in.Data(i)))
				}
				got++
			}
		}
	}
	return nil
}
