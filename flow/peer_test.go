package flow

import (
	"fmt"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// counter is an XDP program that counts packets and lets them pass.
type counter struct {
	*ebpf.Program
	counts *ebpf.Map
}

func newCounter(t testing.TB) *counter {
	t.Helper()
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Array, KeySize: 4, ValueSize: 8, MaxEntries: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	const pass = 2 // XDP_PASS
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.XDP, License: "Apache-2.0", Instructions: asm.Instructions{
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.LoadMapPtr(asm.R1, m.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, -4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "end"),
		asm.Mov.Imm(asm.R1, 1),
		asm.StoreXAdd(asm.R0, asm.R1, asm.DWord),
		asm.Mov.Imm(asm.R0, pass).WithSymbol("end"), asm.Return(),
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return &counter{p, m}
}

func (c *counter) count(t testing.TB) (n uint64) {
	t.Helper()
	if err := c.counts.Lookup(uint32(0), &n); err != nil {
		t.Fatal(err)
	}
	return n
}

// attachXDP puts a program at a pod's own interface.
func attachXDP(t testing.TB, pod *netns.Host, p *ebpf.Program, flags link.XDPAttachFlags) link.Link {
	t.Helper()
	var l link.Link
	index := linkOf(t, pod, "eth0").Attrs().Index
	if err := pod.Do(func() (err error) {
		l, err = link.AttachXDP(link.XDPOptions{Program: p, Interface: index, Flags: flags})
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// TestPeersWithXDP: packets go straight to a pod's own interface only while that is known to
// have no XDP program, and are redirected towards it only while it has none that they then pass
// by, whoever put it there and how.
func TestPeersWithXDP(t *testing.T) {
	requireRoot(t)
	lab := netns.NewLab(t, 1)
	pod, nl := lab.Backends[0], lab.Node.Netlink()
	for _, l := range []netlink.Link{
		&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}},
		&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "one"}, PeerName: "two"},
	} {
		if err := nl.LinkAdd(l); err != nil {
			t.Fatal(err)
		}
	}
	o, err := openOthers(lab.Node.FD(), "sluice")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(o.close)
	lookAll(t, o, lab.Node)
	expect := func(when string, want map[string]kernelWay) {
		t.Helper()
		for name, ways := range want {
			if got, err := o.at(linkOf(t, lab.Node, name)); got&^kernelWayWAY_FROM != ways || err != nil {
				t.Errorf("%s, %s: ways %b, %v; want %b", when, name, got, err, ways)
			}
		}
	}
	const into, straight = kernelWayWAY_INTO, kernelWayWAY_INTO | kernelWayWAY_PEER
	none := map[string]kernelWay{"b1": straight, "client": straight, "br": into, "one": into, "two": into}
	// The program of a pod behind a bridge, or a pair, of the node's is passed by too.
	generic := map[string]kernelWay{"b1": 0, "client": straight, "br": 0, "one": 0, "two": 0}
	driver := map[string]kernelWay{"b1": into, "client": straight, "br": into, "one": into, "two": into}
	expect("nothing", none)
	p := newCounter(t)
	at := func(when string, isNews bool, want map[string]kernelWay) {
		t.Helper()
		if news := lookAll(t, o, lab.Node); news != isNews {
			t.Errorf("%s: news for other interfaces: %v", when, news)
		}
		expect(when, want)
	}
	l := attachXDP(t, pod, p.Program, link.XDPGenericMode)
	at("generic", true, generic)
	_ = l.Close()
	at("generic, gone", true, none)
	l = attachXDP(t, pod, p.Program, link.XDPDriverMode)
	at("driver", false, driver)
	_ = l.Close()
	at("driver, gone", false, none)
	eth0 := linkOf(t, pod, "eth0")
	byNetlink := func(fd int) { // without a BPF link
		t.Helper()
		if err := pod.Do(func() error { return netlink.LinkSetXdpFd(eth0, fd) }); err != nil {
			t.Fatal(err)
		}
	}
	byNetlink(p.FD())
	at("by netlink", false, driver)
	byNetlink(-1)
	at("by netlink, gone", false, none)
	l = attachXDP(t, pod, p.Program, link.XDPGenericMode)
	at("generic again", true, generic)
	_ = l.Close()
	if err := nl.LinkDel(linkOf(t, lab.Node, "b1")); err != nil {
		t.Fatal(err)
	}
	delete(none, "b1")
	at("the interface is gone", true, none)
}

// TestPeersUnread: a peer that cannot be read may have any program.
func TestPeersUnread(t *testing.T) {
	requireRoot(t)
	lab := netns.NewLab(t, 1)
	p, err := openPeers(lab.Node.FD())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	for name, change := range map[string]func(*netlink.LinkAttrs){
		"no peer":      func(a *netlink.LinkAttrs) { a.ParentIndex = 9999 },
		"no namespace": func(a *netlink.LinkAttrs) { a.NetNsID = 9999 },
	} {
		l := linkOf(t, lab.Node, "b1")
		change(l.Attrs())
		news, err := p.look([]netlink.Link{l}, func(int) bool { return true })
		if ways := p.ways(l); ways != 0 {
			t.Errorf("%s: ways %b, %v, %v", name, ways, news, err)
		}
		if gone := name == "no peer"; (err == nil) != gone {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// passXDP has an XDP program come to a pod's own interface, and waits until the ways into an
// interface that leads to the pod are others. All packets have to pass the program.
func (s *shortcutNet) passXDP(pod *netns.Host, flags link.XDPAttachFlags, by string, ways kernelWay) {
	s.t.Helper()
	p := newCounter(s.t)
	l := attachXDP(s.t, pod, p.Program, flags)
	index := uint32(linkOf(s.t, s.lab.Node, by).Attrs().Index)
	wait.For(s.t, "the ways to the pod are others", patience, func() error {
		var is kernelWay
		if err := s.server.kernel.Ways.Lookup(index, &is); err != nil {
			return err
		}
		if is&^kernelWayWAY_FROM != ways {
			return fmt.Errorf("ways %b", is)
		}
		return nil
	})
	const questions = 50
	before, want := p.count(s.t), uint64(questions*len(s.conns))
	took := s.ask(questions)
	if met := p.count(s.t) - before; met < want {
		s.t.Errorf("%d of %d packets passed the pod's XDP program", met, want)
	}
	if took < want*8/10 { // the answers at least
		s.t.Errorf("%d packets skipped the IP stack", took)
	}
	if err := l.Close(); err != nil {
		s.t.Fatal(err)
	}
	s.awaitMost()
}

// TestShortcutsMeetXDPOfAPod: packets of open connections pass an XDP program that comes to a
// pod's own interface. Where redirected ones would pass it by, they take the node's IP stack.
func TestShortcutsMeetXDPOfAPod(t *testing.T) {
	s := newShortcutNet(t, false)
	s.awaitMost()
	s.passXDP(s.lab.Backends[0], link.XDPDriverMode, "b1", kernelWayWAY_INTO)
	s.passXDP(s.lab.Backends[0], link.XDPGenericMode, "b1", 0)
}
