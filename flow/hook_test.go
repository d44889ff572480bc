package flow

import (
	"errors"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/flow/attach"
	"github.com/sluice-proxy/sluice/test/foreign"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Where there is no tcx, filters of clsact do the same, beside those of others.
func TestFiltersInPlaceOfTCX(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	nl, index := lab.Node.Netlink(), lab.Node.Link(t, "client").Attrs().Index
	if err := errors.Join(
		nl.QdiscAdd(&netlink.GenericQdisc{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
			QdiscType:  "clsact",
		}),
		nl.FilterReplace(&netlink.BpfFilter{ // another program's, of the same priority
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1, Protocol: syscall.ETH_P_ALL},
			Fd:          foreign.Idle(t).FD(), Name: "others", DirectAction: true,
		})); err != nil {
		t.Fatal(err)
	}
	n := newNode(t, lab, func(o *Options) { o.filters = true })
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	for range 2 {
		must.Equal(t, must.Get(lab.Client.Ask("tcp", vip4+":80"))(t), "b1:8080")
	}
}

// A start that fails leaves no filters, unless connections of an earlier process need them.
func TestFailedStartLeavesNoFilters(t *testing.T) {
	for _, left := range []int{0, 1} {
		lab := netns.NewLab(t, 0)
		n := newNode(t, lab, func(o *Options) { o.filters = true })
		n.onLoop(func() { n.server.worker.left = left })
		n.server.started.Store(false) // its last step fails
		n.left = true
		n.end()
		if got, err := attach.RemoveFilters(lab.Node.Netlink()); err != nil || (got > 0) != (left > 0) {
			t.Errorf("%d connections: %d filters, %v", left, got, err)
		}
	}
}

const tcIndex = 44 // its offset in struct __sk_buff

// attachAtEgress attaches a program to the egress of a host's interface, before ours or behind it.
func attachAtEgress(t *testing.T, host *netns.Host, name string, at link.Anchor, code asm.Instructions) {
	t.Helper()
	p := must.Get(ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Apache-2.0", Instructions: code}))(t)
	defer p.Close() // the link keeps it
	list := must.Get(host.Netlink().LinkByName(name))(t)
	must.OK(t, host.Do(func() error {
		l, err := link.AttachTCX(link.TCXOptions{Interface: list.Attrs().Index, Program: p, Attach: ebpf.AttachTCXEgress, Anchor: at})
		if err == nil {
			t.Cleanup(func() { _ = l.Close() })
		}
		return err
	}))
}

// What a packet's tc_index says of its way ends with our programs: others behind them find 0.
func TestTcIndexIsGivenBack(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	lab.Backends[0].EchoUDP(t, 8080)
	for _, hidden := range []bool{false, true} {
		n := newNode(t, lab, nil)
		n.config.MasqueradeAll = hidden
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
		for _, name := range []string{"b1", "client"} {
			attachAtEgress(t, lab.Node, name, link.Tail(), asm.Instructions{
				asm.LoadMem(asm.R2, asm.R1, tcIndex, asm.Word),
				asm.Mov.Imm(asm.R0, -1), // go on
				asm.JEq.Imm(asm.R2, 0, "end"),
				asm.Mov.Imm(asm.R0, 2), // drop
				asm.Return().WithSymbol("end"),
			})
		}
		for _, network := range []string{"tcp", "udp"} {
			if said, err := askBy(lab.Client, network, vip4+":80"); err != nil || said != "b1:8080" {
				t.Errorf("hidden %v, %s: %q, %v", hidden, network, said, err)
			}
		}
		n.stop()
		n.leave()
	}
}
