package flow

import (
	"fmt"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// A session is the kernel's where the table decides, whatever its first datagrams are: several in
// one packet (GSO), or one in fragments.
func TestFirstDatagramsOfEachShape(t *testing.T) {
	t.Parallel()
	shapes := []struct{ segment, bytes, datagrams int }{
		{100, 950, 10},
		{1000, 9500, 10}, // longer than an upcall
		{0, 4000, 1},     // in fragments
	}
	for _, vip := range []string{vip4, vip6} {
		t.Run(vip, func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoUDP(t, 8080)
			n := newNode(t, lab, nil)
			endpoint := lab.Backends[0].IPv4
			if vip == vip6 {
				endpoint = lab.Backends[0].IPv6
			}
			n.apply(svc(vip, nil, at(endpoint, 8080)))
			for _, s := range shapes {
				t.Run(fmt.Sprintf("%d bytes by %d", s.bytes, s.segment), func(t *testing.T) {
					c := lab.Client.Connect(t, "udp", net.JoinHostPort(vip, "80"))
					if s.segment != 0 {
						segmented(t, c.(*net.UDPConn), s.segment)
					}
					must.OK(t, must.Err(c.Write(make([]byte, s.bytes))))
					for range s.datagrams {
						_ = c.SetReadDeadline(time.Now().Add(patience))
						must.OK(t, must.Err(c.Read(make([]byte, 1<<16))))
					}
				})
			}
			wait.True(t, "the process hears of all", func() bool { return n.server.Stats().Open == 3 })
			if s := n.server.Stats(); s.Kernel["passed_shape"] != 0 || s.Kernel["asked"] != 0 || s.Damaged != 0 {
				t.Errorf("%+v", s)
			}
			n.finish()
			var datagrams, bytes uint64
			for _, r := range n.taken() {
				if r.Path != conntrack.Kernel || r.Attempts != 1 {
					t.Errorf("%+v", r)
				}
				datagrams, bytes = datagrams+r.DatagramsFromClient, bytes+r.BytesFromClient
			}
			if datagrams != 21 || bytes != 950+9500+4000 {
				t.Errorf("records of %d datagrams, %d bytes", datagrams, bytes)
			}
		})
	}
}

// segmented has a socket send datagrams of a size, many at once.
func segmented(t *testing.T, c *net.UDPConn, size int) {
	t.Helper()
	raw, err := c.SyscallConn()
	must.OK(t, err)
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_SEGMENT, size)
	}); cerr != nil || err != nil {
		t.Fatal(cerr, err)
	}
}
