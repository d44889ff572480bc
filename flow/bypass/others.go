package bypass

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	mdlayher "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// others finds other programs that look at packets which the node forwards. It is for one
// goroutine.
type others struct {
	namespace int
	ownTable  string // of nftables
	own       map[ebpf.ProgramID]bool
	isOwn     func(filter string) bool
	nft       *kernel.NFTables   // nil: the kernel has no nftables
	xfrm, nl  *netlink.Handle    // xfrm is nil where the kernel has no IPsec
	netfilter *netfilterPrograms // nil: the kernel has none of them, or unread says why they cannot be read
	unread    error
	peers     *peers

	generation string          // of nftables, when they were listed
	chain      string          // of another program
	rulesOf    string          // the same, when their rules were read
	onNode     firewall.OnNode // what these do with the node's own packets
	beside     *beside         // since the last inStack; nil: not read yet
	queues     map[int]bool    // interfaces with a queueing discipline that packets wait in
}

// openOthers opens what finds programs, filters and rules that are not Sluice's own.
func openOthers(namespace int, ownTable string, isOwn func(filter string) bool, own ...*ebpf.Program) (*others, error) {
	o := &others{namespace: namespace, ownTable: ownTable, isOwn: isOwn, own: make(map[ebpf.ProgramID]bool)}
	for _, p := range own {
		info, err := p.Info()
		if err != nil {
			return nil, err
		}
		id, _ := info.ID()
		o.own[id] = true
	}
	var err error
	if o.nl, err = kernel.Open(namespace, syscall.NETLINK_ROUTE); err != nil {
		return nil, err
	}
	if o.peers, err = openPeers(namespace); err != nil {
		o.nl.Close()
		return nil, err
	}
	if err := o.open(); err != nil {
		o.close()
		return nil, err
	}
	o.netfilter, o.unread = openNetfilterPrograms(namespace)
	return o, nil
}

// open opens what the kernel has now: modules may be loaded later.
func (o *others) open() (err error) {
	if o.nft == nil {
		nft, err := kernel.OpenNFTables(o.namespace)
		if err == nil {
			o.nft = nft
		} else if !isMissing(err) {
			return err
		}
	}
	if o.xfrm == nil {
		if o.xfrm, err = kernel.Open(o.namespace, syscall.NETLINK_XFRM); err != nil && !isMissing(err) {
			return err
		}
	}
	return nil
}

// isMissing reports whether the kernel lacks the feature.
func isMissing(err error) bool {
	return errors.Is(err, syscall.EPROTONOSUPPORT) || errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.EINVAL)
}

func (o *others) close() {
	if o.nft != nil {
		o.nft.Close()
	}
	if o.xfrm != nil {
		o.xfrm.Close()
	}
	o.peers.close()
	o.nl.Close()
}

// inStack names what looks at forwarded packets in the node's IP stack: a chain of nftables,
// a BPF program of netfilter, a table of iptables-legacy, a service of IPVS, or a policy of
// IPsec. It is empty if nothing does. Few kernels list the functions of other modules
// (CONFIG_NETFILTER_NETLINK_HOOK).
func (o *others) inStack() (what string, err error) {
	o.beside = nil
	if err = o.nftables(); o.chain != "" || err != nil {
		return o.chain, err
	}
	return o.besideRules(isForwarding)
}

// beside is what looks at packets beside nftables.
type beside struct {
	programs []uint32 // hooks of netfilter's BPF programs
	other    string   // a table, IPVS or IPsec
	err      error
}

// besideRules names what looks at packets at some hooks beside nftables. It reads that once after each
// inStack.
func (o *others) besideRules(hooks func(uint32) bool) (what string, err error) {
	if o.beside == nil {
		o.beside = o.readBeside()
	}
	if o.beside.err == nil && slices.ContainsFunc(o.beside.programs, hooks) {
		return "a BPF program of netfilter", nil
	}
	return o.beside.other, o.beside.err
}

func (o *others) readBeside() *beside {
	b := &beside{err: o.unread}
	if b.err == nil && o.netfilter != nil {
		b.programs, b.err = o.netfilter.hooks()
	}
	if b.err == nil {
		b.err = sys.InNetNS(o.namespace, func() error {
			for _, program := range []string{"ip", "ip6"} {
				names, _ := sys.ReadKernelFile("/proc/thread-self/net/" + program + "_tables_names")
				if tables := strings.Fields(string(names)); len(tables) > 0 {
					b.other = fmt.Sprintf("the table %s of %stables-legacy", tables[0], program)
				}
			}
			const heading = 3 // lines
			if services, _ := sys.ReadKernelFile("/proc/thread-self/net/ip_vs"); strings.Count(string(services), "\n") > heading {
				b.other = "IPVS"
			}
			return nil
		})
	}
	if b.other != "" || b.err != nil || o.xfrm == nil {
		return b
	}
	policies, err := kernel.Uninterrupted(func() ([]netlink.XfrmPolicy, error) { return o.xfrm.XfrmPolicyList(netlink.FAMILY_ALL) })
	if err != nil && !isMissing(err) {
		b.err = fmt.Errorf("policies of IPsec: %w", err)
	}
	if len(policies) > 0 {
		b.other = "an IPsec policy"
	}
	return b
}

// Numbers of linux/netfilter.h.
const (
	nfprotoInet, nfprotoNetdev = 1, 5
	hookForward                = 2
	hookPostrouting            = 4
	hookPrerouting             = 0
	hookIngress                = 5 // of NFPROTO_INET
)

// nftables looks for a base chain of others that packets pass. It reads the chains again only if
// nftables have changed.
func (o *others) nftables() error {
	if o.nft == nil {
		return nil
	}
	answers, err := o.nft.Get(syscall.AF_UNSPEC, kernel.GetGen, 0)
	if isMissing(err) {
		return nil // netfilter without nf_tables
	}
	if err != nil || len(answers) == 0 {
		return fmt.Errorf("nftables: generation: %w", err)
	}
	generation := string(answers[0].Attribute(attrGeneration))
	if generation == o.generation {
		return nil
	}
	chains, err := o.nft.Get(syscall.AF_UNSPEC, kernel.GetChain, mdlayher.Dump)
	if err != nil {
		return fmt.Errorf("nftables: chains: %w", err)
	}
	o.chain = ""
	for _, c := range chains {
		table := kernel.Text(c.Attribute(kernel.AttrChainTable))
		if c.Family == nfprotoInet && table == o.ownTable {
			continue
		}
		if passes(&c, isForwarding) {
			o.chain = fmt.Sprintf("the chain %s of nftables' table %s", kernel.Text(c.Attribute(kernel.AttrChainName)), table)
			break
		}
	}
	o.generation = generation
	return nil
}

const (
	attrGeneration = 1 // NFTA_GEN_ID
	attrHookNumber = 1 // NFTA_HOOK_HOOKNUM
)

// passes reports whether packets at some hooks, or those that an interface receives, pass a chain.
func passes(c *kernel.Object, hooks func(uint32) bool) bool {
	hook, is := kernel.Number(kernel.Attribute(c.Attribute(kernel.AttrChainHook), attrHookNumber))
	if !is {
		return false
	}
	switch c.Family {
	case nfprotoNetdev:
		return true
	case nfprotoInet, syscall.AF_INET, syscall.AF_INET6:
		return hooks(hook) || hook == hookIngress
	}
	return false
}

// isForwarding reports whether forwarded packets pass a hook of an IP family.
func isForwarding(hook uint32) bool {
	return hook == hookPrerouting || hook == hookForward || hook == hookPostrouting
}

// Node says what becomes of the node's own connections.
type Node struct {
	Relayed     string // why all are to be relayed, or ""
	NoFragments string // what may drop datagrams that the node fragments for them, or ""
	Masquerade  bool   // the node gives some packets an address of its own: they must have it already
}

// ofNode names what looks at packets of the node's own connections, or at packets that arrive at
// some interface: rules that judge them, a program of netfilter, a program at lo's egress, or a
// strict source check at all interfaces. It also names lo's forwarding setting if that keeps
// programs at lo from asking for routes.
func (o *others) ofNode() (n Node, err error) {
	if err = o.nftables(); err != nil {
		return n, err
	}
	if o.nft != nil && o.rulesOf != o.generation {
		if o.onNode, err = firewall.ReadOnNode(o.nft, o.ownTable); err != nil {
			return n, err
		}
		o.rulesOf = o.generation
	}
	n = Node{Relayed: o.onNode.Judges, NoFragments: o.onNode.Forwards, Masquerade: o.onNode.Translates != ""}
	if n.Relayed == "" {
		n.Relayed, err = o.besideRules(func(uint32) bool { return true })
	}
	if n.Relayed == "" && err == nil {
		n.Relayed, err = o.aroundNode()
	}
	return n, err
}

// aroundNode names what else keeps the node's own connections from the kernel.
func (o *others) aroundNode() (what string, err error) {
	if is, err := o.programs(kernel.Loopback, egressSide); is || err != nil {
		return "another program at lo's egress", err
	}
	if strict, err := o.checksSources("all"); strict || err != nil {
		return "net.ipv4.conf.all.rp_filter is 1", err
	}
	return o.forwardsNot()
}

// forwardsNot names the setting by which lo alone does not forward, or returns "".
func (o *others) forwardsNot() (what string, err error) {
	err = sys.InNetNS(o.namespace, func() error {
		for _, family := range []string{"ipv4", "ipv6"} {
			all, err := sys.ReadKernelFile("/proc/sys/net/" + family + "/conf/all/forwarding")
			if errors.Is(err, fs.ErrNotExist) {
				continue // no IPv6
			}
			own, errOwn := sys.ReadKernelFile("/proc/sys/net/" + family + "/conf/lo/forwarding")
			if err := cmp.Or(err, errOwn); err != nil {
				return fmt.Errorf("forwarding of lo: %w", err)
			}
			if string(all) != string(own) {
				what = "net." + family + ".conf.lo.forwarding is " + strings.TrimSpace(string(own))
			}
		}
		return nil
	})
	return what, err
}

// look reads what at needs to know about all interfaces.
func (o *others) look() error {
	if err := o.open(); err != nil {
		return err
	}
	list, err := kernel.Uninterrupted(func() ([]netlink.Qdisc, error) { return o.nl.QdiscList(nil) })
	if err != nil {
		return fmt.Errorf("queueing disciplines: %w", err)
	}
	o.queues = make(map[int]bool)
	for _, q := range list {
		if kind := q.Type(); kind != "noqueue" && kind != "clsact" && kind != "ingress" {
			o.queues[q.Attrs().LinkIndex] = true
		}
	}
	return nil
}

// at returns the ways that packets may take at an interface.
func (o *others) at(l netlink.Link) (ways Way, err error) {
	a := l.Attrs()
	ingress, err := o.programs(a.Index, ingressSide)
	if err != nil {
		return 0, err
	}
	watched := Way(0)
	if ingress {
		watched = Watched
	}
	if a.MasterIndex != 0 {
		return watched, nil
	}
	ways = o.peers.ways(l) | watched
	strict, err := o.checksSources(a.Name)
	if err != nil {
		return 0, err
	}
	if !ingress && !strict {
		ways |= From
	}
	if ways&Peer == 0 {
		return ways, nil
	}
	egress, err := o.programs(a.Index, egressSide)
	if err != nil {
		return 0, err
	}
	if egress || o.queues[a.Index] {
		ways &^= Peer
	}
	return ways, nil
}

// queryTries bounds the questions for the programs at one side of an interface. One fails with
// ENOSPC if a program comes after it has asked how many there are.
const queryTries = 10

// programs reports whether others have programs at one side of an interface.
func (o *others) programs(index int, s side) (bool, error) {
	var attached *link.QueryResult
	err := sys.InNetNS(o.namespace, func() (err error) {
		for range queryTries {
			attached, err = link.QueryPrograms(link.QueryOptions{Target: index, Attach: s.tcx})
			if !errors.Is(err, syscall.ENOSPC) {
				break
			}
		}
		return err
	})
	if err != nil && !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.EINVAL) && !errors.Is(err, ebpf.ErrNotSupported) {
		return false, fmt.Errorf("programs at %s: %w", s.name, err)
	}
	if err == nil {
		for _, p := range attached.Programs {
			if !o.own[p.ID] {
				return true, nil
			}
		}
	}
	return o.hasFilters(index, s), nil
}

// checksSources reports whether the kernel compares where packets come in with the route to
// their source (strict reverse path filtering), which a shortcut does not.
func (o *others) checksSources(ifname string) (strict bool, err error) {
	err = sys.InNetNS(o.namespace, func() error {
		larger := ""
		for _, name := range []string{"all", ifname} {
			b, err := sys.ReadKernelFile("/proc/sys/net/ipv4/conf/" + name + "/rp_filter")
			if err != nil {
				return fmt.Errorf("reverse path filter: %w", err)
			}
			larger = max(larger, strings.TrimSpace(string(b)))
		}
		strict = larger == "1"
		return nil
	})
	return strict, err
}

// side is one side of an interface: where its programs are attached.
type side struct {
	name   string
	tcx    ebpf.AttachType
	parent uint32 // of clsact's filters
}

var (
	ingressSide = side{"ingress", ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS}
	egressSide  = side{"egress", ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS}
)

// hasFilters reports whether others have filters at one side of an interface, or may have some.
func (o *others) hasFilters(index int, s side) bool {
	list, err := kernel.Uninterrupted(func() ([]netlink.Filter, error) {
		return o.nl.FilterList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}}, s.parent)
	})
	if err != nil {
		return true
	}
	return slices.ContainsFunc(list, func(f netlink.Filter) bool {
		b, is := f.(*netlink.BpfFilter)
		return !is || !o.isOwn(b.Name)
	})
}
