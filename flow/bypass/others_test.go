package bypass

import (
	"net"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"

	"github.com/sluice-proxy/sluice/test/foreign"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestOthersInTheStack: a chain, a table or a policy of another program that forwarded packets
// pass is found, whoever has it, and forgotten when it is gone.
func TestOthersInTheStack(t *testing.T) {
	requireRoot(t)
	lab := netns.NewLab(t, 1)
	o := must.Get(openOthers(lab.Node.FD(), "sluice", isOurs))(t)
	t.Cleanup(o.close)
	run := func(name string, args ...string) func() {
		return func() {
			must.Run(t, lab.Node.Command(t, name, args...))
		}
	}
	chain := func(table, head string) func() {
		return func() { lab.Node.NFT(t, "table "+table+" {\n\tchain c {\n\t\t"+head+"\n\t}\n}") }
	}
	gone := func() { lab.Node.NFT(t, "flush ruleset") }
	policy := &netlink.XfrmPolicy{Dir: netlink.XFRM_DIR_FWD, Src: ipNet("10.1.0.0/24"), Dst: ipNet("10.2.0.0/16")}
	xfrm := must.Get(netlink.NewHandleAt(vnetns.NsHandle(lab.Node.FD()), syscall.NETLINK_XFRM))(t)
	t.Cleanup(xfrm.Close)
	for _, c := range []struct {
		name, want string
		do, undo   func()
	}{
		{"nothing", "", func() {}, func() {}},
		{"our own table", "", chain("inet sluice", "type filter hook prerouting priority -310"), gone},
		{"our name in another family", "the chain c of nftables' table sluice", chain("ip sluice", "type filter hook forward priority 0"), gone},
		{"forward", "the chain c of nftables' table other", chain("inet other", "type filter hook forward priority 0"), gone},
		{"prerouting", "the chain c of nftables' table other", chain("ip other", "type filter hook prerouting priority -300"), gone},
		{"postrouting of IPv6", "the chain c of nftables' table other", chain("ip6 other", "type nat hook postrouting priority 100"), gone},
		{"ingress", "the chain c of nftables' table other", chain("netdev other", `type filter hook ingress device "b1" priority 0`), gone},
		{"ingress of inet", "the chain c of nftables' table other", chain("inet other", `type filter hook ingress device "b1" priority 0`), gone},
		{"input", "", chain("inet other", "type filter hook input priority 0"), gone},
		{"a chain without a hook", "", chain("inet other", ""), gone},
		{"iptables-nft", "the chain FORWARD of nftables' table filter", run("iptables-nft", "-A", "FORWARD", "-j", "ACCEPT"), gone},
		{"IPsec", "an IPsec policy", func() { must.OK(t, xfrm.XfrmPolicyAdd(policy)) }, func() { must.OK(t, xfrm.XfrmPolicyDel(policy)) }},
		// Last: the kernel keeps a table that iptables-legacy has made.
		{"iptables-legacy", "the table filter of iptables-legacy", run("iptables-legacy", "-A", "FORWARD", "-j", "ACCEPT"), nil},
	} {
		c.do()
		if what, err := o.inStack(); what != c.want || err != nil {
			t.Errorf("%s: %q, %v; want %q", c.name, what, err, c.want)
		}
		if c.undo == nil {
			continue
		}
		c.undo()
		if what, err := o.inStack(); what != "" || err != nil {
			t.Errorf("%s, when it was gone: %q, %v", c.name, what, err)
		}
	}
}

func ipNet(s string) *net.IPNet {
	_, n, err := net.ParseCIDR(s)
	if err != nil {
		panic(err)
	}
	return n
}

// TestOthersAtInterfaces: packets skip the IP stack, or an interface on their way to a pod,
// only where no program, rule or queue of others is.
func TestOthersAtInterfaces(t *testing.T) {
	requireRoot(t)
	own := foreign.Idle(t)
	const all = From | Into | Peer
	for _, c := range []struct {
		name   string
		ways   Way
		change func(t *testing.T, n *netns.Host, b1 netlink.Link) error
	}{
		{"nothing", all, func(*testing.T, *netns.Host, netlink.Link) error { return nil }},
		{"our own programs", all, func(t *testing.T, n *netns.Host, b1 netlink.Link) error {
			return attachBoth(t, n, b1, own, ebpf.AttachTCXIngress, ebpf.AttachTCXEgress)
		}},
		{"a program at ingress", all&^From | Watched, func(t *testing.T, n *netns.Host, b1 netlink.Link) error {
			return attachBoth(t, n, b1, foreign.Idle(t), ebpf.AttachTCXIngress)
		}},
		{"a program at egress", all &^ Peer, func(t *testing.T, n *netns.Host, b1 netlink.Link) error {
			return attachBoth(t, n, b1, foreign.Idle(t), ebpf.AttachTCXEgress)
		}},
		{"filters", Into | Watched, func(t *testing.T, n *netns.Host, b1 netlink.Link) error {
			if err := n.Netlink().QdiscAdd(&netlink.GenericQdisc{
				QdiscAttrs: netlink.QdiscAttrs{LinkIndex: b1.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
				QdiscType:  "clsact",
			}); err != nil {
				return err
			}
			for _, s := range []side{ingressSide, egressSide} {
				if err := n.Netlink().FilterAdd(&netlink.BpfFilter{
					FilterAttrs: netlink.FilterAttrs{LinkIndex: b1.Attrs().Index, Parent: s.parent, Handle: 1, Priority: 1, Protocol: syscall.ETH_P_ALL},
					Fd:          foreign.Idle(t).FD(), Name: "theirs", DirectAction: true,
				}); err != nil {
					return err
				}
			}
			return nil
		}},
		{"a queue", all &^ Peer, func(_ *testing.T, n *netns.Host, b1 netlink.Link) error {
			return n.Netlink().QdiscAdd(&netlink.Tbf{
				QdiscAttrs: netlink.QdiscAttrs{LinkIndex: b1.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
				Rate:       1 << 20, Limit: 1 << 16, Buffer: 1 << 16,
			})
		}},
		{"a bridge", 0, func(_ *testing.T, n *netns.Host, b1 netlink.Link) error {
			bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}}
			if err := n.Netlink().LinkAdd(bridge); err != nil {
				return err
			}
			return n.Netlink().LinkSetMaster(b1, bridge)
		}},
		{"strict reverse path filtering", all &^ From, func(_ *testing.T, n *netns.Host, _ netlink.Link) error {
			return n.SetSysctl("net/ipv4/conf/b1/rp_filter", "1")
		}},
		{"strict reverse path filtering everywhere", all &^ From, func(_ *testing.T, n *netns.Host, _ netlink.Link) error {
			return n.SetSysctl("net/ipv4/conf/all/rp_filter", "1")
		}},
		{"loose reverse path filtering", all, func(_ *testing.T, n *netns.Host, _ netlink.Link) error {
			return n.SetSysctl("net/ipv4/conf/b1/rp_filter", "2")
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			for _, name := range []string{"all", "b1"} { // the host's may be another one
				must.OK(t, lab.Node.SetSysctl("net/ipv4/conf/"+name+"/rp_filter", "0"))
			}
			must.OK(t, c.change(t, lab.Node, lab.Node.Link(t, "b1")))
			o := must.Get(openOthers(lab.Node.FD(), "sluice", isOurs, own))(t)
			defer o.close()
			lookAll(t, o, lab.Node)
			if ways, err := o.at(lab.Node.Link(t, "b1")); ways != c.ways || err != nil {
				t.Errorf("ways %b, %v; want %b", ways, err, c.ways)
			}
		})
	}
}

func attachBoth(t *testing.T, n *netns.Host, l netlink.Link, p *ebpf.Program, sides ...ebpf.AttachType) error {
	return n.Do(func() error {
		for _, s := range sides {
			l, err := link.AttachTCX(link.TCXOptions{Interface: l.Attrs().Index, Program: p, Attach: s})
			if err != nil {
				return err
			}
			t.Cleanup(func() { _ = l.Close() })
		}
		return nil
	})
}

// lookAll has everything read that ways go by, and returns whether peers have news.
func lookAll(t *testing.T, o *others, n *netns.Host) bool {
	t.Helper()
	list := must.Get(n.Netlink().LinkList())(t)
	must.OK(t, o.look())
	return must.Get(o.peers.look(list, func(int) bool { return true }))(t)
}

// TestPeersOfOneNamespace: a packet cannot go straight to a peer in the node's own namespace,
// nor into an interface that is none of a pair.
func TestPeersOfOneNamespace(t *testing.T) {
	requireRoot(t)
	lab := netns.NewLab(t, 0)
	nl := lab.Node.Netlink()
	for _, l := range []netlink.Link{
		&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "one"}, PeerName: "two"},
		&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br"}},
	} {
		must.OK(t, nl.LinkAdd(l))
	}
	o := must.Get(openOthers(lab.Node.FD(), "sluice", isOurs))(t)
	defer o.close()
	lookAll(t, o, lab.Node)
	for _, name := range []string{"one", "two", "br"} {
		if ways, err := o.at(lab.Node.Link(t, name)); ways != From|Into || err != nil {
			t.Errorf("%s: %b, %v", name, ways, err)
		}
	}
}
