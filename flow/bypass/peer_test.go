package bypass

import (
	"testing"

	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/foreign"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

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
		must.OK(t, nl.LinkAdd(l))
	}
	o := must.Get(openOthers(lab.Node.FD(), "sluice", isOurs))(t)
	t.Cleanup(o.close)
	lookAll(t, o, lab.Node)
	expect := func(when string, want map[string]Way) {
		t.Helper()
		for name, ways := range want {
			if got, err := o.at(lab.Node.Link(t, name)); got&^From != ways || err != nil {
				t.Errorf("%s, %s: ways %b, %v; want %b", when, name, got, err, ways)
			}
		}
	}
	const into, straight = Into, Into | Peer
	none := map[string]Way{"b1": straight, "client": straight, "br": into, "one": into, "two": into}
	// The program of a pod behind a bridge, or a pair, of the node's is passed by too.
	generic := map[string]Way{"b1": 0, "client": straight, "br": 0, "one": 0, "two": 0}
	driver := map[string]Way{"b1": into, "client": straight, "br": into, "one": into, "two": into}
	expect("nothing", none)
	p := foreign.NewCounter(t)
	at := func(when string, isNews bool, want map[string]Way) {
		t.Helper()
		check.Equalf(t, lookAll(t, o, lab.Node), isNews, "%s: news for other interfaces", when)
		expect(when, want)
	}
	l := foreign.AttachXDP(t, pod, p.Program, link.XDPGenericMode)
	at("generic", true, generic)
	_ = l.Close()
	at("generic, gone", true, none)
	l = foreign.AttachXDP(t, pod, p.Program, link.XDPDriverMode)
	at("driver", false, driver)
	_ = l.Close()
	at("driver, gone", false, none)
	eth0 := pod.Link(t, "eth0")
	byNetlink := func(fd int) { // without a BPF link
		t.Helper()
		must.OK(t, pod.Do(func() error { return netlink.LinkSetXdpFd(eth0, fd) }))
	}
	byNetlink(p.FD())
	at("by netlink", false, driver)
	byNetlink(-1)
	at("by netlink, gone", false, none)
	l = foreign.AttachXDP(t, pod, p.Program, link.XDPGenericMode)
	at("generic again", true, generic)
	_ = l.Close()
	must.OK(t, nl.LinkDel(lab.Node.Link(t, "b1")))
	delete(none, "b1")
	at("the interface is gone", true, none)
}

// TestPeersUnread: a peer that cannot be read may have any program.
func TestPeersUnread(t *testing.T) {
	requireRoot(t)
	lab := netns.NewLab(t, 1)
	p := must.Get(openPeers(lab.Node.FD()))(t)
	t.Cleanup(p.close)
	for name, change := range map[string]func(*netlink.LinkAttrs){
		"no peer":      func(a *netlink.LinkAttrs) { a.ParentIndex = 9999 },
		"no namespace": func(a *netlink.LinkAttrs) { a.NetNsID = 9999 },
	} {
		l := lab.Node.Link(t, "b1")
		change(l.Attrs())
		news, err := p.look([]netlink.Link{l}, func(int) bool { return true })
		if ways := p.ways(l); ways != 0 {
			t.Errorf("%s: ways %b, %v, %v", name, ways, news, err)
		}
		check.Equalf(t, err == nil, name == "no peer", "%s: %v", name, err)
	}
}
