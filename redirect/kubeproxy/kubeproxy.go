// Package kubeproxy removes what kube-proxy leaves behind when it is replaced:
// its rules go on steering packets, to endpoints of long ago.
package kubeproxy

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"syscall"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/redirect/iptables"
)

// table is the name of kube-proxy's nftables tables, one of each family.
const table = "kube-proxy"

// addressSets are the sets of it whose elements begin with a Service's address.
var addressSets = []string{"cluster-ips", "service-ips"}

// chains are kube-proxy's in iptables. The kubelet's own (KUBE-FIREWALL,
// KUBE-KUBELET-CANARY, KUBE-IPTABLES-HINT) are not among them.
var chains = []string{
	"KUBE-SERVICES", "KUBE-EXTERNAL-SERVICES", "KUBE-NODEPORTS", "KUBE-NODE-PORT", "KUBE-POSTROUTING", "KUBE-FORWARD",
	"KUBE-PROXY-FIREWALL", "KUBE-PROXY-CANARY", "KUBE-MARK-MASQ", "KUBE-SOURCE-RANGES-FIREWALL", "KUBE-LOAD-BALANCER",
	"KUBE-IPVS-FILTER", "KUBE-IPVS-OUT-FILTER",
}

// chainPrefixes are those of its chains for services and endpoints.
var chainPrefixes = []string{"KUBE-SVC-", "KUBE-SVL-", "KUBE-EXT-", "KUBE-FW-", "KUBE-SEP-", "KUBE-XLB-"}

// IsChain reports whether a chain of iptables has a name of kube-proxy's.
func IsChain(name string) bool {
	return slices.Contains(chains, name) ||
		slices.ContainsFunc(chainPrefixes, func(p string) bool { return strings.HasPrefix(name, p) })
}

// Remove removes what kube-proxy's nftables, iptables and IPVS modes left in a
// network namespace, and the tracked UDP flows to Services' addresses, which
// would otherwise go on to the endpoint that was chosen once (A8.6). netNS is a
// descriptor of the namespace; 0 is the one that it is called in. It gives a
// line for each thing that it removed. Only chains of iptables-legacy need the
// programs of iptables; the error says what stays without them, and that virtual
// servers of IPVS stay.
func Remove(netNS int) (removed []string, err error) {
	fromTables, addresses, err := removeTables(netNS)
	removed = append(removed, fromTables...)
	fromChains, inChains, chainErr := removeNFTChains(netNS)
	removed = append(removed, fromChains...)
	fromLegacy, rules, left, legacyErr := iptables.RemoveLegacyChains(netNS, IsChain)
	removed = append(removed, fromLegacy...)
	if len(left) > 0 {
		legacyErr = errors.Join(legacyErr, missingPrograms(left))
	}
	fromIPVS, ofIPVS, ipvsErr := removeIPVS(netNS)
	removed = append(removed, fromIPVS...)
	addresses = slices.Concat(addresses, inChains, addressesOf(rules), ofIPVS)
	flows, flowErr := removeFlows(netNS, addresses)
	if flows > 0 {
		removed = append(removed, fmt.Sprintf("%d tracked UDP flows to Services", flows))
	}
	return removed, errors.Join(err, chainErr, legacyErr, ipvsErr, flowErr)
}

// removeTables removes the nftables tables and gives the Services' addresses
// that were in them. A kernel without nf_tables has none.
func removeTables(netNS int) (removed []string, addresses []netip.Addr, err error) {
	conn, err := nftables.New(nftables.WithNetNSFd(netNS))
	if err != nil {
		return nil, nil, fmt.Errorf("nftables: %w", err)
	}
	tables, err := conn.ListTables()
	if firewall.NoTables(err) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("nftables: %w", err)
	}
	for _, t := range tables {
		name, ours := map[nftables.TableFamily]string{nftables.TableFamilyIPv4: "ip", nftables.TableFamilyIPv6: "ip6"}[t.Family]
		if !ours || t.Name != table {
			continue
		}
		addresses = append(addresses, addressesIn(conn, t)...)
		conn.DelTable(t)
		removed = append(removed, "table "+name+" "+table)
	}
	if err := conn.Flush(); err != nil {
		return nil, nil, fmt.Errorf("nftables: %w", err)
	}
	return removed, addresses, nil
}

// addressesIn returns the addresses in a table's sets, as far as they can be
// read: what is missed only costs a flow its patience.
func addressesIn(conn *nftables.Conn, t *nftables.Table) (addresses []netip.Addr) {
	length := 4
	if t.Family == nftables.TableFamilyIPv6 {
		length = 16
	}
	for _, name := range addressSets {
		elements, err := conn.GetSetElements(&nftables.Set{Table: t, Name: name})
		if err != nil {
			continue
		}
		for _, e := range elements {
			if len(e.Key) >= length {
				a, _ := netip.AddrFromSlice(e.Key[:length])
				addresses = append(addresses, a)
			}
		}
	}
	return addresses
}

// addressesOf returns the destinations that iptables rules name.
func addressesOf(rules []string) (addresses []netip.Addr) {
	for _, rule := range rules {
		words := strings.Fields(rule)
		i := slices.Index(words, "-d")
		if i < 0 || i+1 == len(words) || i > 0 && words[i-1] == "!" {
			continue
		}
		if p, err := netip.ParsePrefix(words[i+1]); err == nil && p.IsSingleIP() {
			addresses = append(addresses, p.Addr())
		}
	}
	return addresses
}

// removeFlows removes what connection tracking knows of UDP to addresses.
func removeFlows(netNS int, addresses []netip.Addr) (removed uint, err error) {
	if len(addresses) == 0 {
		return 0, nil
	}
	toServices := make(destinations, len(addresses))
	for _, a := range addresses {
		toServices[a] = true
	}
	nl, err := kernel.Open(netNS, syscall.NETLINK_NETFILTER)
	if err != nil {
		return 0, fmt.Errorf("connection tracking: %w", err)
	}
	defer nl.Close()
	for _, family := range []netlink.InetFamily{syscall.AF_INET, syscall.AF_INET6} {
		n, err := nl.ConntrackDeleteFilters(netlink.ConntrackTable, family, toServices)
		removed += n
		if err != nil && !errors.Is(err, syscall.ENOENT) && !errors.Is(err, syscall.EOPNOTSUPP) && !errors.Is(err, syscall.EINVAL) {
			return removed, fmt.Errorf("connection tracking: %w", err)
		}
	}
	return removed, nil
}

// destinations match UDP flows to addresses.
type destinations map[netip.Addr]bool

// MatchConntrackFlow is asked by the library for each flow.
func (d destinations) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	to, _ := netip.AddrFromSlice(flow.Forward.DstIP)
	return flow.Forward.Protocol == syscall.IPPROTO_UDP && d[to.Unmap()]
}
