package flow

import (
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The relay serves while the kernel verifies the programs: then its UDP sessions stay its own, as
// they would get another endpoint otherwise.
func TestSessionsOfTheRelayStayItsOwn(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoUDP(t, 8080)
		vip := netip.MustParseAddrPort(vip4 + ":80")
		n := newNode(t, lab, func(o *Options) {
			by(o)
			o.Relayed = func(visit func(client, vip netip.AddrPort)) { visit(at(lab.Client.IPv4, 41000), vip) }
		})
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
		send := func(port uint16) net.Conn {
			t.Helper()
			c, err := lab.Client.Dialer(&net.Dialer{LocalAddr: net.UDPAddrFromAddrPort(at(lab.Client.IPv4, port))}, "udp", vip.String())
			must.OK(t, err)
			t.Cleanup(func() { _ = c.Close() })
			must.OK(t, must.Err(c.Write([]byte("who\n"))))
			return c
		}
		// Another tenant's packets that go to the relay are many, and the client's last one was long ago.
		until := uint64(sys.Monotonic() + int64(relayedUDP))
		for i := range 40000 {
			key := bpf.TupleOf(syscall.IPPROTO_UDP, at(netip.AddrFrom4([4]byte{10, 2, byte(i >> 8), byte(i)}), 1000), vip)
			must.OK(t, n.server.kernel.Maps.Relayed.Put(&key, &until))
		}
		_ = send(41000).Close()
		wait.True(t, "the relay's client is left to it", func() bool { return n.server.Stats().Kernel["passed_relayed"] == 1 })
		n.server.Session(at(lab.Client.IPv4, 41000), vip, false)
		for _, c := range []net.Conn{send(41000), send(41001)} {
			_ = c.SetReadDeadline(time.Now().Add(patience))
			check.OKf(t, must.Err(c.Read(make([]byte, 100))), "a client that the relay does not have")
		}
	})
}

// A process forgets what an earlier process's relay served, and keeps what its own relay has served
// since its start.
func TestRelayOfAnEarlierProcessIsForgotten(t *testing.T) {
	lab := netns.NewLab(t, 0)
	n := newNode(t, lab, nil)
	vip := netip.MustParseAddrPort(vip4 + ":80")
	earlier, own := bpf.TupleOf(syscall.IPPROTO_UDP, at(lab.Client.IPv4, 41000), vip), bpf.TupleOf(syscall.IPPROTO_UDP, at(lab.Client.IPv4, 41001), vip)
	m := n.server.kernel.Maps.Relayed
	for key, until := range map[bpf.KernelTuple]int64{earlier: n.server.began - 1 + int64(relayedUDP), own: sys.Monotonic() + int64(relayedUDP)} {
		must.OK(t, m.Put(&key, uint64(until)))
	}
	n.onLoop(func() {
		check.OK(t, n.server.worker.forgetRelayed())
	})
	var until uint64
	if m.Lookup(&earlier, &until) == nil || m.Lookup(&own, &until) != nil {
		t.Error("the earlier one is known, or the own one is not")
	}
}
