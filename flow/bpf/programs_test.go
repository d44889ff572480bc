package bpf

import (
	"encoding/binary"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/test/must"
)

// BenchmarkPrograms measures the programs alone: a packet of an open flow, and one that is of
// no flow, at both hooks. The flow gives packets the addresses that they have, so that each
// run finds the same packet.
func BenchmarkPrograms(b *testing.B) {
	requireRoot(b)
	k := must.Get(Open(1024, nil))(b)
	b.Cleanup(k.Close)
	for _, c := range []struct {
		name             string
		protocol         uint8
		client, endpoint netip.AddrPort
	}{
		{"TCP/IPv4", syscall.IPPROTO_TCP, netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.1.0.1:80")},
		{"UDP/IPv4", syscall.IPPROTO_UDP, netip.MustParseAddrPort("10.0.0.1:40000"), netip.MustParseAddrPort("10.1.0.1:80")},
		{"TCP/IPv6", syscall.IPPROTO_TCP, netip.MustParseAddrPort("[fd00::1]:40000"), netip.MustParseAddrPort("[fd01::1]:80")},
	} {
		f := &k.Flows[1]
		*f = KernelFlow{
			State: KernelStateOPEN, Protocol: c.protocol, Seen: KernelSeenCONFIRMED,
			Client: AddressOf(c.client.Addr()), ClientPort: Wire(c.client.Port()), MiddlePort: Wire(c.client.Port()),
			Vip: AddressOf(c.endpoint.Addr()), VipPort: Wire(c.endpoint.Port()),
			Endpoint: AddressOf(c.endpoint.Addr()), EndpointPort: Wire(c.endpoint.Port()),
			Answered: 1, Data: 1,
		}
		there, back := TupleOf(c.protocol, c.client, c.endpoint), TupleOf(c.protocol, c.endpoint, c.client)
		for _, hook := range []struct {
			name     string
			program  *ebpf.Program
			from, to netip.AddrPort
			key      KernelTuple
			role     KernelRole
		}{
			{"ingress", k.Ethernet.Ingress, c.client, c.endpoint, there, KernelRoleTO_ENDPOINT},
			{"egress", k.Ethernet.Egress, c.endpoint, c.client, back, KernelRoleTO_CLIENT},
		} {
			for _, role := range []KernelRole{hook.role, KernelRoleROLE_NONE} {
				name := c.name + "/" + hook.name + "/open"
				if role == KernelRoleROLE_NONE {
					name = c.name + "/" + hook.name + "/none"
					k.Index.Erase(1, hook.key)
				} else if !k.Index.Put(&hook.key, ReferenceTo(1, role)) {
					b.Fatal("no room")
				}
				packet := plainPacket(c.protocol, hook.from, hook.to, 128)
				b.Run(name, func(b *testing.B) {
					const each = 10000
					least := time.Hour // other programs disturb the rest
					for range (b.N + each - 1) / each {
						_, d, err := hook.program.Benchmark(packet, each, nil)
						must.OK(b, err)
						least = min(least, d)
					}
					b.ReportMetric(float64(least.Nanoseconds()), "ns/least")
				})
			}
			k.Index.Erase(1, hook.key)
		}
	}
}

// plainPacket is a whole packet in an Ethernet frame.
func plainPacket(protocol uint8, from, to netip.AddrPort, payload int) []byte {
	header := 20
	if protocol == syscall.IPPROTO_UDP {
		header = 8
	}
	frame := make([]byte, 14)
	if from.Addr().Is4() {
		frame[12], frame[13] = 0x08, 0x00
		ip := make([]byte, 20)
		ip[0], ip[8], ip[9] = 0x45, 64, protocol
		binary.BigEndian.PutUint16(ip[2:], uint16(20+header+payload))
		copy(ip[12:], from.Addr().AsSlice())
		copy(ip[16:], to.Addr().AsSlice())
		frame = append(frame, ip...)
	} else {
		frame[12], frame[13] = 0x86, 0xdd
		ip := make([]byte, 40)
		ip[0], ip[6], ip[7] = 0x60, protocol, 64
		binary.BigEndian.PutUint16(ip[4:], uint16(header+payload))
		copy(ip[8:], from.Addr().AsSlice())
		copy(ip[24:], to.Addr().AsSlice())
		frame = append(frame, ip...)
	}
	h := make([]byte, header+payload)
	binary.BigEndian.PutUint16(h, from.Port())
	binary.BigEndian.PutUint16(h[2:], to.Port())
	if protocol == syscall.IPPROTO_UDP {
		binary.BigEndian.PutUint16(h[4:], uint16(len(h)))
		h[6], h[7] = 1, 1
	} else {
		h[12], h[13] = 0x50, 0x10
	}
	return append(frame, h...)
}
