package route

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"syscall"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// rule is a policy routing rule of ours: what distinguishes two of them.
type rule struct {
	family      service.Family
	mark        uint32     // and mask; 0 matches any
	to          netip.Addr // matches this address alone, if valid
	protocol    int        // 0 matches any
	first, last uint16     // destination ports; 0 matches any
	fromHost    bool       // matches what this node sends itself
	table       int        // to look into; 0 for a rule that does nothing or jumps
	jump        int        // the priority of the rule to go on with; 0 for none
	priority    int
}

// ruleChanges is what has to be done to the rules of one family.
type ruleChanges struct {
	add    []rule
	remove []netlink.Rule
}

func (r *Router) steerRule(f service.Family) rule {
	return rule{family: f, mark: r.opts.SteerMark, table: r.opts.SteerTable, priority: r.opts.RulePriority}
}

func (r *Router) portRule(d service.Destination) rule {
	return rule{family: service.FamilyOf(d.Addr), to: d.Addr, protocol: int(redirect.ProtocolNumber(d.Protocol)), first: d.Port, last: d.Port,
		table: r.opts.SteerTable, priority: r.opts.RulePriority}
}

// replyRules bring answers to clients' own addresses back. With marks they match the
// ports of our sockets too, and ICMP, which has none:
//
//	83: fwmark 0x2000/0x2000 ipproto tcp dport 10000-29999 lookup 8377
//	83: fwmark 0x2000/0x2000 ipproto udp dport 10000-29999 lookup 8377
//	83: fwmark 0x2000/0x2000 ipproto icmp lookup 8377
//
// A mark alone would do for the answers. But firewalls look up where a packet's source
// is with its mark and without its ports (nftables' fib saddr . mark, rpfilter's
// --validmark), and would find every source local and the answer forged.
//
// Without marks the rules match ports alone (F11), and then must not match what this
// node sends itself: it sends no such answers, but its servers and our listeners do send
// to clients that use ports of the range, as other systems than Linux do. A rule cannot
// ask for packets that come in from elsewhere, so that the first one skips the others:
//
//	84: iif lo goto 86
//	85: ipproto tcp dport 61000-63266 lookup 8377
//	85: ipproto udp dport 61000-63266 lookup 8377
//	85: ipproto tcp dport 63267-65534 lookup 8378
//	85: ipproto udp dport 63267-65534 lookup 8378
//	86: nop
//
// The first table has clients behind this node, the second all others: see
// clients.
func (r *Router) replyRules(f service.Family, s *State) []rule {
	if s.ReplyPorts == [2]uint16{} {
		return nil
	}
	all := rule{family: f, table: r.opts.ReplyTable, priority: r.opts.RulePriority}
	var rules []rule
	if s.MarkReplies {
		all.mark = r.opts.ReplyMark
		errors := all
		errors.protocol = icmpOf(f)
		rules = append(rules, errors)
	} else {
		past, end := r.opts.RulePriority+1, r.opts.RulePriority+3
		rules = append(rules, rule{family: f, priority: end}, rule{family: f, fromHost: true, jump: end, priority: past})
		all.priority = r.opts.RulePriority + 2
	}
	byPorts := func(table int, ports [2]uint16) {
		for _, p := range []service.Protocol{service.TCP, service.UDP} {
			k := all
			k.table, k.protocol, k.first, k.last = table, int(redirect.ProtocolNumber(p)), ports[0], ports[1]
			rules = append(rules, k)
		}
	}
	if !s.repliesByClient() {
		byPorts(r.opts.ReplyTable, s.ReplyPorts)
		return rules
	}
	behind, others := splitPorts(s.ReplyPorts)
	byPorts(r.opts.ReplyTable, behind)
	byPorts(r.opts.ReplyTable+1, others)
	return rules
}

// icmpOf returns the number of a family's ICMP.
func icmpOf(f service.Family) int {
	if f == service.IPv6 {
		return syscall.IPPROTO_ICMPV6
	}
	return syscall.IPPROTO_ICMP
}

// maxPriority leaves room for those rules before that of the table main.
const maxPriority = 32765 - 3 // 32766 is the table main's

// diffRules compares our rules with those wanted. The error names each rule of
// another program that takes our packets, or whose packets ours would take; rules
// that clash with one are left out.
func (r *Router) diffRules(f service.Family, w *wants) (c ruleChanges, err error) {
	want := w.rules
	have, err := r.rules(f)
	if err != nil {
		if len(want) == 0 {
			return c, nil
		}
		return c, err
	}
	missing := make(map[rule]bool, len(want))
	for _, k := range want {
		missing[k] = true
	}
	var clashes []error
	for _, k := range have {
		if !r.isOurRule(&k) {
			for own := range missing {
				if clash := own.clash(&k); clash != nil {
					clashes = append(clashes, clash)
					break
				}
			}
			continue
		}
		if own, ok := parseRule(&k); ok && missing[own] {
			delete(missing, own)
		} else {
			c.remove = append(c.remove, k)
		}
	}
	for _, k := range want {
		if missing[k] && !r.prevents(have, k) && !slices.Contains(w.noMoreRules, k.table) {
			c.add = append(c.add, k)
			delete(missing, k)
		}
	}
	return c, errors.Join(clashes...)
}

// compareRules orders the rules of single ports, so that they are added in the
// same order each time.
func compareRules(a, b rule) int {
	return cmp.Or(a.to.Compare(b.to), cmp.Compare(a.first, b.first), cmp.Compare(a.protocol, b.protocol))
}

// clash says how a rule of another program clashes with one of ours, or nil.
func (k rule) clash(theirs *netlink.Rule) error {
	switch {
	case k.table != 0 && theirs.Table == k.table:
		return &redirect.ClashError{What: ruleText(theirs), Remedy: "give the proxy the number of a table that nobody uses"}
	case usesMark(theirs, k.mark):
		return &redirect.ClashError{What: ruleText(theirs), Remedy: "give the proxy a mark that nobody uses"}
	}
	return nil
}

// CheckSockets returns a *redirect.ClashError if a rule of another program takes
// packets that have Options.SocketMark and no other mark.
func (r *Router) CheckSockets() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for f := range redirect.Families {
		have, err := r.rules(f)
		if err != nil {
			return err
		}
		for _, k := range have {
			if usesMark(&k, r.opts.SocketMark) && k.Mark&^r.opts.SocketMark == 0 && !k.Invert {
				return &redirect.ClashError{What: ruleText(&k), Remedy: "give the proxy's sockets a mark that nobody uses"}
			}
		}
	}
	return nil
}

// prevents reports whether a rule of another program prevents one of ours.
func (r *Router) prevents(have []netlink.Rule, k rule) bool {
	return slices.ContainsFunc(have, func(theirs netlink.Rule) bool { return !r.isOurRule(&theirs) && k.clash(&theirs) != nil })
}

// usesMark reports whether a rule is for packets that have a bit of the mark set.
func usesMark(k *netlink.Rule, mark uint32) bool {
	mask := ^uint32(0)
	if k.Mask != nil {
		mask = *k.Mask
	}
	return k.Mark&mask&mark != 0
}

func (r *Router) addRule(k *rule) error {
	nl := k.netlink()
	if err := r.nl.RuleAdd(nl); err != nil {
		return ruleError("add", nl, err)
	}
	return nil
}

// removeRule accepts that a rule is gone already.
func (r *Router) removeRule(k *netlink.Rule) error {
	if err := r.nl.RuleDel(k); err != nil && !errors.Is(err, syscall.ENOENT) {
		return ruleError("remove", k, err)
	}
	return nil
}

// rules returns all policy routing rules of a family. A kernel that does not have
// them is a *redirect.MissingError.
func (r *Router) rules(f service.Family) ([]netlink.Rule, error) {
	var rules []netlink.Rule
	var err error
	for range readsOfRules {
		rules, err = r.nl.RuleList(netlinkFamily(f))
		if !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	switch {
	case noSuchFamily(err) && f == service.IPv6 && !r.hasFamily(f):
		return nil, nil
	case noSuchFamily(err):
		return nil, &redirect.MissingError{Mode: "routes", Feature: FeaturePolicyRouting, Remedy: remedyPolicyRouting, Err: err}
	case err != nil:
		return nil, fmt.Errorf("policy routing rules: %w", err)
	}
	return rules, nil
}

// readsOfRules is how often rules are read that others keep changing.
const readsOfRules = 10

// FeaturePolicyRouting is what addresses of others and clients' own addresses
// need; the rest goes without.
const FeaturePolicyRouting redirect.Feature = "policy routing"

const remedyPolicyRouting = "a kernel with CONFIG_IP_MULTIPLE_TABLES and CONFIG_IPV6_MULTIPLE_TABLES; without it, only addresses of this node's own are served, and endpoints see the node's address"

// isOurRule reports whether a rule is ours.
func (r *Router) isOurRule(k *netlink.Rule) bool {
	if k.Protocol != Protocol {
		return false
	}
	after := k.Priority - r.opts.RulePriority
	// Another proxy of this kind may have the table after our reply table.
	return k.Table == r.opts.SteerTable || k.Table == r.opts.ReplyTable || k.Table == r.opts.ReplyTable+1 && after == 2 ||
		k.Table == 0 && after > 0 && after <= 3
}

func (k rule) netlink() *netlink.Rule {
	nl := netlink.NewRule()
	nl.Family, nl.Table, nl.Priority, nl.Protocol = netlinkFamily(k.family), k.table, k.priority, Protocol
	if k.mark != 0 {
		nl.Mark, nl.Mask = k.mark, &k.mark
	}
	if k.to.IsValid() {
		nl.Dst = ipNet(netip.PrefixFrom(k.to, k.to.BitLen()))
	}
	nl.IPProto = k.protocol
	if k.first != 0 {
		nl.Dport = netlink.NewRulePortRange(k.first, k.last)
	}
	if k.fromHost {
		nl.IifName = loopback
	}
	switch {
	case k.jump != 0:
		nl.Goto = k.jump
	case k.table == 0:
		nl.Type = actionNothing
	}
	return nl
}

// loopback is where the kernel says that what this node sends comes in.
const loopback = "lo"

// actionNothing is FR_ACT_NOP: a rule that does nothing and can be jumped to.
const actionNothing = 3

// parseRule is netlink backwards. It refuses what a rule of ours never has.
func parseRule(nl *netlink.Rule) (k rule, ok bool) {
	if nl.Invert || nl.Tos != 0 || nl.TunID != 0 || nl.Src != nil || nl.OifName != "" ||
		nl.IifName != "" && nl.IifName != loopback || nl.Sport != nil || nl.UIDRange != nil || nl.Mask != nil && *nl.Mask != nl.Mark {
		return k, false
	}
	k = rule{mark: nl.Mark, protocol: nl.IPProto, fromHost: nl.IifName != "", table: nl.Table, jump: max(nl.Goto, 0),
		priority: nl.Priority, family: service.IPv4}
	if nl.Family == netlink.FAMILY_V6 {
		k.family = service.IPv6
	}
	if nl.Dst != nil {
		p := prefixOf(nl.Dst, k.family)
		if p.Bits() != p.Addr().BitLen() {
			return k, false
		}
		k.to = p.Addr()
	}
	if nl.Dport != nil {
		k.first, k.last = nl.Dport.Start, nl.Dport.End
	}
	return k, true
}

// ruleText says a rule as `ip rule` takes it.
func ruleText(k *netlink.Rule) string {
	text := "rule"
	if k.Family == netlink.FAMILY_V6 {
		text += " -6"
	}
	if k.Dst != nil {
		text += " to " + k.Dst.IP.String()
		if bits, all := k.Dst.Mask.Size(); bits != all {
			text += "/" + strconv.Itoa(bits)
		}
	}
	if k.Mark != 0 || k.Mask != nil {
		text += fmt.Sprintf(" fwmark %#x", k.Mark)
		if k.Mask != nil {
			text += fmt.Sprintf("/%#x", *k.Mask)
		}
	}
	if k.IPProto != 0 {
		text += " ipproto " + protocolName(k.IPProto)
	}
	if k.Dport != nil {
		text += " dport " + strconv.Itoa(int(k.Dport.Start))
		if k.Dport.End != k.Dport.Start {
			text += "-" + strconv.Itoa(int(k.Dport.End))
		}
	}
	if k.IifName != "" {
		text += " iif " + k.IifName
	}
	switch {
	case k.Goto > 0:
		text += " goto " + strconv.Itoa(k.Goto)
	case k.Table == 0:
		text += " nop"
	default:
		text += " lookup " + strconv.Itoa(k.Table)
	}
	if k.Protocol != 0 {
		text += " proto " + strconv.Itoa(int(k.Protocol))
	}
	return text + " priority " + strconv.Itoa(k.Priority)
}

func ruleError(verb string, k *netlink.Rule, err error) error {
	switch {
	case errors.Is(err, syscall.EPERM):
		return missingRight(err)
	case errors.Is(err, syscall.EEXIST):
		return &redirect.ClashError{What: "the same as " + ruleText(k), Remedy: "give the proxy another mark, table or priority"}
	}
	return fmt.Errorf("%s %s: %w", verb, ruleText(k), err)
}

func protocolName(number int) string {
	switch number {
	case syscall.IPPROTO_ICMP:
		return "icmp"
	case syscall.IPPROTO_ICMPV6:
		return "ipv6-icmp"
	}
	if p := redirect.ProtocolOf(uint8(number)); p != 0 {
		return p.String()
	}
	return strconv.Itoa(number)
}
