package bpf

import (
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// A packet goes where another one of its flow went a moment ago only if that is its own hop, too. No
// interface has ways here when it comes: it takes the shortcut by the hop that is known, or none.
func TestKnownHopsServeLikePackets(t *testing.T) {
	requireRoot(t)
	const flow, transport, tos = 1, ethernetHeader + 20, ethernetHeader + 1
	k := must.Get(Open(10, nil))(t)
	defer k.Close()
	lab := netns.NewLab(t, 1)
	client, vip, endpoint := netip.MustParseAddrPort("10.1.0.2:40000"), netip.MustParseAddrPort("10.96.0.1:80"), netip.AddrPortFrom(lab.Backends[0].IPv4, 80)
	must.OK(t, lab.Node.Netlink().NeighSet(&netlink.Neigh{
		LinkIndex: lab.Node.Link(t, "b1").Attrs().Index, IP: endpoint.Addr().AsSlice(), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9}, State: netlink.NUD_PERMANENT,
	}))
	setWays := func(w KernelWay) { // the tests' packets come in at lo
		for _, name := range []string{"lo", "b1"} {
			must.OK(t, k.Maps.Ways.Put(uint32(lab.Node.Link(t, name).Attrs().Index), w))
		}
	}
	tuple := TupleOf(syscall.IPPROTO_TCP, client, vip)
	k.Index.Put(&tuple, ReferenceTo(flow, KernelRoleTO_ENDPOINT))
	k.Control.ShortcutsUntil = 1 << 62
	frame := func(length int) []byte {
		b := make([]byte, ethernetHeader+length)
		b[12], b[ethernetHeader], b[ethernetHeader+8], b[ethernetHeader+9] = 8, 0x45, 64, syscall.IPPROTO_TCP
		binary.BigEndian.PutUint16(b[ethernetHeader+2:], uint16(length))
		copy(b[ethernetHeader+12:], client.Addr().AsSlice())
		copy(b[ethernetHeader+16:], vip.Addr().AsSlice())
		binary.BigEndian.PutUint16(b[transport:], client.Port())
		binary.BigEndian.PutUint16(b[transport+2:], vip.Port())
		b[transport+12], b[transport+13] = 5<<4, 16 // ACK
		return b
	}
	const redirected = 7
	cpus := ebpf.MustPossibleCPU()
	passes := func(b []byte) (direct bool) {
		must.OK(t, lab.Node.Do(func() error {
			k.Flows[flow].Way[0].Last = uint64(coarse(t))
			verdict, _, err := k.Ethernet.Ingress.Test(b)
			direct = verdict == redirected
			return err
		}))
		return direct
	}
	for _, c := range []struct {
		of     string
		change func(b, hop []byte) []byte
		direct bool
	}{
		{"the same kind", func(b, _ []byte) []byte { return b }, true},
		{"the longest one", func(_, _ []byte) []byte { return frame(1500) }, true},
		{"one that is too long", func(_, _ []byte) []byte { return frame(1501) }, false},
		{"another TOS", func(b, _ []byte) []byte { b[tos] = 16; return b }, false},
		{"the index's next flow", func(b, _ []byte) []byte { k.Flows[flow].Generation++; return b }, false},
		{"the next endpoint", func(b, _ []byte) []byte { k.Flows[flow].Attempts++; return b }, false},
		{"another time", func(b, hop []byte) []byte { clear(hop[:8]); return b }, false},
		{"another flow", func(b, hop []byte) []byte { hop[8]++; return b }, false},
		{"another interface", func(b, hop []byte) []byte { hop[20]++; return b }, false},
		{"other ways", func(b, _ []byte) []byte { k.Control.WaysNumber++; return b }, false},
	} {
		k.Flows[flow] = KernelFlow{
			Client: AddressOf(client.Addr()), Vip: AddressOf(vip.Addr()), Endpoint: AddressOf(endpoint.Addr()), ClientPort: Wire(client.Port()), VipPort: Wire(vip.Port()), EndpointPort: Wire(endpoint.Port()),
			MiddlePort: Wire(client.Port()), Protocol: syscall.IPPROTO_TCP, State: KernelStateOPEN, Seen: KernelSeenCONFIRMED | KernelSeenPASSED,
		}
		setWays(KernelWayWAY_FROM | KernelWayWAY_INTO)
		if !passes(frame(100)) {
			t.Fatal("no shortcut by open ways")
		}
		setWays(0)
		b, slot := frame(100), uint32(0)
		for all := k.Maps.Hops.Iterate(); ; {
			var at uint32
			var hops [][]byte // of each CPU
			if !all.Next(&at, &hops) {
				must.OK(t, all.Err())
				break
			}
			known := slices.IndexFunc(hops, func(hop []byte) bool { return binary.NativeEndian.Uint32(hop[8:]) != 0 })
			if known < 0 {
				continue
			}
			hop := hops[known]
			binary.NativeEndian.PutUint64(hop, 1<<62) // however long this test takes
			b = c.change(b, hop)
			must.OK(t, k.Maps.Hops.Put(at, slices.Repeat([][]byte{hop}, cpus)))
			slot = at
		}
		check.Equalf(t, passes(b), c.direct, "a packet of %s goes there", c.of)
		// The next packet may note its hop on another CPU.
		must.OK(t, k.Maps.Hops.Put(slot, slices.Repeat([][]byte{make([]byte, k.Maps.Hops.ValueSize())}, cpus)))
	}
}
