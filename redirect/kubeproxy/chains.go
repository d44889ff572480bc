package kubeproxy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/host/kernel"
)

// programs name iptables-nft's tables of a family as its programs do.
var programs = map[nftables.TableFamily]string{nftables.TableFamilyIPv4: "iptables", nftables.TableFamilyIPv6: "ip6tables"}

// chainsAtOnce bounds the chains of one transaction, for the socket's buffer.
const chainsAtOnce = 200

// removeNFTChains removes kube-proxy's chains of iptables-nft by netlink, so that no
// iptables program is needed, with the rules of built-in chains that lead to them. It
// leaves chains to which chains of others lead. It also returns the Services'
// addresses in them.
func removeNFTChains(netNS int) (removed []string, addresses []netip.Addr, err error) {
	conn, all, err := firewall.Chains(netNS)
	if err != nil {
		return nil, nil, err
	}
	type place struct {
		family nftables.TableFamily
		table  string
	}
	tables := make(map[place][]*nftables.Chain)
	for _, c := range all {
		if programs[c.Table.Family] != "" && c.Table.Name != table {
			at := place{c.Table.Family, c.Table.Name}
			tables[at] = append(tables[at], c)
		}
	}
	for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
		for _, name := range []string{"filter", "mangle", "nat", "raw", "security"} { // those of iptables
			gone, of, err := removeChains(conn, tables[place{family, name}])
			addresses = append(addresses, of...)
			for _, c := range gone {
				removed = append(removed, programs[family]+" (nft) "+name+" chain "+c)
			}
			if err != nil {
				return removed, addresses, fmt.Errorf("%s (nft) table %s: %w", programs[family], name, err)
			}
		}
	}
	return removed, addresses, nil
}

// removeChains removes those of a table's chains that are kube-proxy's.
func removeChains(conn *nftables.Conn, all []*nftables.Chain) (removed []string, addresses []netip.Addr, err error) {
	ours := make(map[string]*nftables.Chain)
	for _, c := range all {
		if IsChain(c.Name) {
			ours[c.Name] = c
		}
	}
	if len(ours) == 0 {
		return nil, nil, nil
	}
	rules := func(c *nftables.Chain) []*nftables.Rule {
		list, getErr := conn.GetRules(c.Table, c)
		err = errors.Join(err, getErr)
		return list
	}
	if services := ours["KUBE-SERVICES"]; services != nil {
		for _, r := range rules(services) {
			if a, ok := destinationOf(r); ok {
				addresses = append(addresses, a)
			}
		}
	}
	var jumps []*nftables.Rule
	var used []string
	for _, c := range all {
		if IsChain(c.Name) {
			continue
		}
		for _, r := range rules(c) {
			switch to := chainOf(r); {
			case ours[to] == nil:
			case c.Hooknum != nil: // a built-in chain
				jumps = append(jumps, r)
			default:
				used = append(used, to)
			}
		}
	}
	for ; len(used) > 0; used = used[1:] {
		if c := ours[used[0]]; c != nil {
			delete(ours, used[0])
			for _, r := range rules(c) {
				used = append(used, chainOf(r))
			}
		}
	}
	jumps = slices.DeleteFunc(jumps, func(r *nftables.Rule) bool { return ours[chainOf(r)] == nil })
	if err != nil {
		return nil, nil, err
	}
	// Nothing leads there after the first transaction, whatever becomes of the others.
	for _, r := range jumps {
		if err := conn.DelRule(r); err != nil {
			return nil, nil, err
		}
	}
	if err := conn.Flush(); err != nil {
		return nil, nil, err
	}
	for name := range ours {
		removed = append(removed, name)
	}
	slices.Sort(removed)
	for _, change := range []func(*nftables.Chain){conn.FlushChain, conn.DelChain} {
		for part := range slices.Chunk(removed, chainsAtOnce) {
			for _, name := range part {
				change(ours[name])
			}
			if err := conn.Flush(); err != nil {
				return nil, addresses, err
			}
		}
	}
	return removed, addresses, nil
}

// chainOf returns the chain that a rule leads to, or "".
func chainOf(r *nftables.Rule) string {
	for _, e := range r.Exprs {
		if v, ok := e.(*expr.Verdict); ok {
			return v.Chain
		}
	}
	return ""
}

// Kept names the chains of kube-proxy that are there after Remove, in the calling
// thread's network namespace: chains of others lead to them, or kube-proxy still runs.
func Kept() (kept []string, err error) {
	_, chains, err := firewall.Chains(0)
	for _, c := range chains {
		if program := programs[c.Table.Family]; program != "" && c.Table.Name != table && IsChain(c.Name) {
			kept = append(kept, program+" (nft) "+c.Table.Name+" chain "+c.Name)
		}
	}
	err = errors.Join(err, kernel.LegacyChains(func(program, chain string) {
		if IsChain(chain) {
			kept = append(kept, program+" (legacy) chain "+chain)
		}
	}))
	slices.Sort(kept)
	return kept, err
}

// destinationOf returns the address to which a rule applies, "-d 10.96.0.10/32".
func destinationOf(r *nftables.Rule) (a netip.Addr, ok bool) {
	for i := 0; i+1 < len(r.Exprs); i++ {
		load, isLoad := r.Exprs[i].(*expr.Payload)
		is, isCmp := r.Exprs[i+1].(*expr.Cmp)
		if isLoad && isCmp && load.Base == expr.PayloadBaseNetworkHeader && is.Op == expr.CmpOpEq &&
			(load.Offset == 16 && load.Len == 4 || load.Offset == 24 && load.Len == 16) { // of IPv4, of IPv6
			return netip.AddrFromSlice(is.Data)
		}
	}
	return a, false
}

// legacyRemedy says what to do where the programs of iptables-legacy are missing.
const legacyRemedy = "run kube-proxy --cleanup from kube-proxy's image, or sluice cleanup --kube-proxy on the node itself"

// missingPrograms returns an error that names chains that cannot be removed.
func missingPrograms(chains []string) error {
	const most = 3
	names := strings.Join(chains[:min(len(chains), most)], ", ")
	if len(chains) > most {
		names += ", …"
	}
	return fmt.Errorf("iptables-legacy has %d chains of kube-proxy (%s), and there is no program iptables-legacy-restore here to remove them: %s", len(chains), names, legacyRemedy)
}
