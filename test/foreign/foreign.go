// Package foreign has BPF programs as other software on a node has them, for tests: they count
// packets or let them pass.
package foreign

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Idle is a program of tc that leaves each packet to the next one.
func Idle(t testing.TB) *ebpf.Program {
	t.Helper()
	const next = -1 // TCX_NEXT
	return load(t, &ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Apache-2.0", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, next), asm.Return()}})
}

func load(t testing.TB, spec *ebpf.ProgramSpec) *ebpf.Program {
	t.Helper()
	p := must.Get(ebpf.NewProgram(spec))(t)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// Counter is an XDP program that counts packets and lets them pass.
type Counter struct {
	*ebpf.Program
	counts *ebpf.Map
}

// NewCounter loads a Counter.
func NewCounter(t testing.TB) *Counter {
	t.Helper()
	m := must.Get(ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1}))(t)
	t.Cleanup(func() { _ = m.Close() })
	const pass = 2 // XDP_PASS
	return &Counter{load(t, &ebpf.ProgramSpec{Type: ebpf.XDP, License: "Apache-2.0", Instructions: asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, pass).WithSymbol("end"), asm.Return(),
	}}), m}
}

// Count returns how many packets have passed.
func (c *Counter) Count(t testing.TB) (n uint64) {
	t.Helper()
	must.OK(t, c.counts.Lookup(uint32(0), &n))
	return n
}

// AttachXDP attaches a program to a pod's own interface.
func AttachXDP(t testing.TB, pod *netns.Host, p *ebpf.Program, flags link.XDPAttachFlags) link.Link {
	t.Helper()
	index := pod.Link(t, "eth0").Attrs().Index
	return attached(t, pod, func() (link.Link, error) {
		return link.AttachXDP(link.XDPOptions{Program: p, Interface: index, Flags: flags})
	})
}

// AttachNetfilter attaches a program that lets all packets pass to a hook of netfilter. It
// takes Linux 6.4.
func AttachNetfilter(t testing.TB, n *netns.Host, family link.NetfilterProtocolFamily, hook link.NetfilterInetHook) link.Link {
	t.Helper()
	const accept = 1 // NF_ACCEPT
	p := load(t, &ebpf.ProgramSpec{Type: ebpf.Netfilter, AttachType: ebpf.AttachNetfilter, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, accept), asm.Return()}})
	l := attached(t, n, func() (link.Link, error) {
		return link.AttachNetfilter(link.NetfilterOptions{Program: p, ProtocolFamily: family, Hook: hook, Priority: 10})
	})
	_ = p.Close() // the link holds it
	return l
}

func attached(t testing.TB, n *netns.Host, attach func() (link.Link, error)) (l link.Link) {
	t.Helper()
	must.OK(t, n.Do(func() (err error) {
		l, err = attach()
		return err
	}))
	t.Cleanup(func() { _ = l.Close() })
	return l
}
