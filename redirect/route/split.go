package route

import (
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/service"
)

// splitTables makes the kernel keep the IPv4 tables local and main apart. Until a
// network namespace has its first policy routing rule, the kernel keeps both in
// one. When it takes them apart, it removes the local routes from that one a moment
// before it looks into the other: a packet to any local address then gets "network
// is unreachable". Later rules have no such moment, so that it must be over before
// Services are served. There is no other way to it than a rule: this one is removed
// again at once, as its table is empty.
//
// Without the right to add rules, or a kernel that has them, nothing happens: no
// rule of ours will come later.
func (r *Router) splitTables() {
	rules, err := r.rules(service.IPv4)
	if err != nil || slices.ContainsFunc(rules, func(k netlink.Rule) bool { return !isKernelRule(&k) }) {
		return
	}
	first := r.steerRule(service.IPv4)
	if r.addRule(&first) == nil {
		_ = r.removeRule(first.netlink()) // if it stays, the comparison of rules removes it
	}
}

// isKernelRule tells the three rules that every network namespace begins with from
// those that somebody added.
func isKernelRule(k *netlink.Rule) bool {
	const main, last = 32766, 32767
	return k.Priority == 0 || k.Priority == main || k.Priority == last
}
