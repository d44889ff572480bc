package firewall

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"

	"github.com/mdlayher/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
)

// OnNode says what other programs' rules of nftables, those of iptables-nft among them, do with the
// packets of the node's own connections. Each is the name of a chain, or "".
type OnNode struct {
	Judges     string // drops, marks, changes or hands up packets that the node sends or receives
	Forwards   string // the same of packets that the node forwards
	Translates string // gives some packets that leave the node the node's address (masquerade)
}

// ReadOnNode looks at all base chains, and at those that their rules lead to. own is as for
// StateRule. What it does not know, judges. Rules of the kubelet and of kube-proxy do not, and
// neither do rules that translate destinations: a Service's is translated before Sluice sees it,
// and that of an endpoint is a pod's. nft is of the network namespace to look at.
func ReadOnNode(nft *kernel.NFTables, own string) (found OnNode, err error) {
	chains, err := nft.Get(syscall.AF_UNSPEC, kernel.GetChain, netlink.Dump)
	if err != nil {
		if NoTables(err) {
			return found, nil
		}
		return found, fmt.Errorf("nftables chains: %w", err)
	}
	rules := make(map[table]map[string][]kernel.Object) // by chain
	for _, c := range chains {
		base, is := baseOf(&c)
		if !is || base.table == (table{nfprotoInet, own}) || base.table.name == kubeProxyTable {
			continue
		}
		if rules[base.table] == nil {
			if rules[base.table], err = rulesOf(nft, base.table); err != nil {
				return found, err
			}
		}
		l := look{base: base, rules: rules[base.table], own: own, seen: make(map[string]bool)}
		l.chain(base.chain)
		name := fmt.Sprintf("the chain %s of nftables' table %s", base.chain, base.table.name)
		l.judges = l.judges || base.drops
		switch {
		case !l.judges:
		case base.hook == hookForward && !base.atDevice:
			found.Forwards = name
		default:
			found.Judges = name
		}
		if l.translates {
			found.Translates = name
		}
	}
	return found, nil
}

// base is a base chain.
type base struct {
	table    table
	chain    string
	hook     uint32
	drops    bool // what no rule accepts
	isNAT    bool
	atDevice bool // of one interface
}

// Numbers of linux/netfilter.h.
const (
	hookForward   = 2
	hookIngress   = 5 // of NFPROTO_INET
	nfprotoNetdev = 5
)

// baseOf reads a base chain of IP or of an interface.
func baseOf(c *kernel.Object) (b base, is bool) {
	const attrHookNumber, attrPolicy, drop = 1, 5, 0
	hook, hooked := kernel.Number(kernel.Attribute(c.Attribute(kernel.AttrChainHook), attrHookNumber))
	isIP := slices.Contains([]byte{nfprotoInet, syscall.AF_INET, syscall.AF_INET6, nfprotoNetdev}, c.Family)
	b = base{
		table: table{c.Family, kernel.Text(c.Attribute(kernel.AttrChainTable))},
		chain: kernel.Text(c.Attribute(kernel.AttrChainName)), hook: hook,
		drops:    isNumber(c.Attribute(attrPolicy), drop),
		isNAT:    kernel.Text(c.Attribute(kernel.AttrChainType)) == "nat",
		atDevice: c.Family == nfprotoNetdev || c.Family == nfprotoInet && hook == hookIngress,
	}
	return b, hooked && isIP
}

// rulesOf reads the rules of a table.
func rulesOf(nft *kernel.NFTables, t table) (map[string][]kernel.Object, error) {
	all := make(map[string][]kernel.Object)
	list, err := nft.Get(t.family, kernel.GetRule, netlink.Dump, kernel.Named(kernel.AttrRuleTable, t.name))
	if err != nil && !errors.Is(err, syscall.ENOENT) {
		return nil, fmt.Errorf("rules of the nftables table %s: %w", t.name, err)
	}
	for _, r := range list {
		if kernel.Text(r.Attribute(kernel.AttrRuleTable)) == t.name { // a kernel may answer with those of all tables
			chain := kernel.Text(r.Attribute(kernel.AttrRuleChain))
			all[chain] = append(all[chain], r)
		}
	}
	return all, nil
}

// look follows the rules of a base chain.
type look struct {
	base               base
	rules              map[string][]kernel.Object
	own                string
	seen               map[string]bool
	judges, translates bool
}

// chain looks at the rules of a chain. All that is at an interface judges.
func (l *look) chain(name string) {
	if l.seen[name] || !counts(name, l.own) {
		return
	}
	l.seen[name] = true
	l.judges = l.judges || l.base.atDevice
	for _, r := range l.rules[name] {
		for _, e := range kernel.Attributes(r.Attribute(kernel.AttrRuleExprs)) {
			l.expression(kernel.Text(kernel.Attribute(e, kernel.AttrExprName)), kernel.Attribute(e, kernel.AttrExprData))
		}
	}
}

// Expressions that only look at a packet. dynset and log tell of it.
var matching = strings.Fields("cmp range bitwise byteorder payload meta ct fib rt socket osf xfrm numgen hash exthdr counter limit quota connlimit last match dynset log")

// Attributes that expressions which load something have instead of those by which they store it.
var storing = map[string]uint16{"payload": 5, "meta": 3, "ct": 4, "exthdr": 7} // NFTA_..._SREG

// expression looks at one expression.
func (l *look) expression(name string, data []byte) {
	switch {
	case name == "immediate" && isNumber(kernel.Attribute(data, attrImmediateDest), 0):
		l.verdict(data)
	case name == "immediate":
	case name == "lookup": // a map of verdicts
		l.judges = l.judges || isNumber(kernel.Attribute(data, attrLookupDest), 0)
	case name == "target":
		const attrTargetName = 1 // NFTA_TARGET_NAME
		l.target(kernel.Text(kernel.Attribute(data, attrTargetName)))
	case name == "masq":
		l.target("MASQUERADE")
	case name == "redir":
		l.target("REDIRECT")
	case name == "nat":
		const attrType, source = 1, 0 // NFTA_NAT_TYPE, NFT_NAT_SNAT
		if isNumber(kernel.Attribute(data, attrType), source) {
			l.target("SNAT")
		} else {
			l.target("DNAT")
		}
	case slices.Contains(matching, name):
		if at, can := storing[name]; can && kernel.Attribute(data, at) != nil {
			l.target("MARK")
		}
	default:
		l.judges = true
	}
}

// verdict handles what becomes of a packet.
func (l *look) verdict(data []byte) {
	const attrData, attrVerdict, attrCode, attrChain = 2, 2, 1, 2 // NFTA_IMMEDIATE_DATA, NFTA_DATA_VERDICT, NFTA_VERDICT_...
	const accept, jump, goTo, none, back = 1, -3, -4, -1, -5      // NF_ACCEPT, NFT_...
	v := kernel.Attribute(kernel.Attribute(data, attrData), attrVerdict)
	code, _ := kernel.Number(kernel.Attribute(v, attrCode))
	switch int32(code) {
	case accept, none, back:
	case jump, goTo:
		l.chain(kernel.Text(kernel.Attribute(v, attrChain)))
	default:
		l.judges = true
	}
}

// target handles what a rule of iptables, or one of nftables that does the same, does to a packet. In
// chains that translate, marks tell other rules there what to do.
func (l *look) target(name string) {
	switch {
	case name == "LOG" || name == "NFLOG":
	case l.base.isNAT && (name == "DNAT" || name == "REDIRECT" || name == "MARK"):
	case l.base.isNAT && name == "MASQUERADE":
		l.translates = true
	default:
		l.judges = true
	}
}
