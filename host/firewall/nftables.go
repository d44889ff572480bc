package firewall

import (
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/mdlayher/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
)

// From linux/netfilter/nf_tables.h.
const (
	attrCTKey         = 2 // NFTA_CT_KEY
	ctState           = 0 // NFT_CT_STATE
	attrImmediateDest = 1 // NFTA_IMMEDIATE_DREG
	attrLookupDest    = 3 // NFTA_LOOKUP_DREG
	attrMatchName     = 1 // NFTA_MATCH_NAME
	attrFIBFlags      = 3 // NFTA_FIB_FLAGS
	fibSource         = 1 // NFTA_FIB_F_SADDR
	fibInput          = 8 // NFTA_FIB_F_IIF
)

// table is one of nftables.
type table struct {
	family byte
	name   string
}

// nftables names a chain with a rule that is wanted, by its expressions. It looks at all
// tables of the calling thread's network namespace but those that only translate
// addresses, which may be large.
func nftables(own string, wanted func(exprs []byte) bool) (string, error) {
	nft, err := kernel.OpenNFTables(0)
	if err != nil {
		return "", err
	}
	defer nft.Close()
	chains, err := nft.Get(syscall.AF_UNSPEC, kernel.GetChain, netlink.Dump)
	if err != nil {
		if NoTables(err) {
			return "", nil
		}
		return "", fmt.Errorf("nftables chains: %w", err)
	}
	var tables []table
	for _, c := range chains {
		t := table{c.Family, kernel.Text(c.Attribute(kernel.AttrChainTable))}
		isIP := t.family == syscall.AF_INET || t.family == syscall.AF_INET6 || t.family == nfprotoInet
		judges := c.Attribute(kernel.AttrChainHook) != nil && kernel.Text(c.Attribute(kernel.AttrChainType)) != "nat"
		if isIP && judges && t.name != kubeProxyTable && t != (table{nfprotoInet, own}) && !slices.Contains(tables, t) {
			tables = append(tables, t)
		}
	}
	for _, t := range tables {
		rules, err := nft.Get(t.family, kernel.GetRule, netlink.Dump, kernel.Named(kernel.AttrRuleTable, t.name))
		if errors.Is(err, syscall.ENOENT) {
			continue // it is gone
		}
		if err != nil {
			return "", fmt.Errorf("rules of the nftables table %s: %w", t.name, err)
		}
		for _, r := range rules {
			chain := kernel.Text(r.Attribute(kernel.AttrRuleChain))
			// A kernel may answer with the rules of all tables.
			if kernel.Text(r.Attribute(kernel.AttrRuleTable)) == t.name && counts(chain, own) && wanted(r.Attribute(kernel.AttrRuleExprs)) {
				return fmt.Sprintf("chain %s of the nftables table %s", chain, t.name), nil
			}
		}
	}
	return "", nil
}

const (
	nfprotoInet     = 1            // NFPROTO_INET
	kubeProxyTable  = "kube-proxy" // of its nftables mode
	kubeProxyPrefix = "KUBE-"      // of the chains of its iptables and IPVS modes
)

// decidesByState reports whether a rule's expressions load the state of the connection,
// and say what becomes of the packet.
func decidesByState(exprs []byte) bool {
	state, decides := false, false
	for _, e := range kernel.Attributes(exprs) {
		data := kernel.Attribute(e, kernel.AttrExprData)
		switch kernel.Text(kernel.Attribute(e, kernel.AttrExprName)) {
		case "ct":
			state = state || isNumber(kernel.Attribute(data, attrCTKey), ctState)
		case "match":
			state = state || isState(kernel.Text(kernel.Attribute(data, attrMatchName)))
		case "immediate":
			decides = decides || isNumber(kernel.Attribute(data, attrImmediateDest), 0) // a verdict
		case "lookup":
			decides = decides || isNumber(kernel.Attribute(data, attrLookupDest), 0)
		case "reject", "queue", "target":
			decides = true
		}
	}
	return state && decides
}

// checksSources reports whether a rule's expressions look up the way to a packet's source
// from the interface that it came by.
func checksSources(exprs []byte) bool {
	for _, e := range kernel.Attributes(exprs) {
		if kernel.Text(kernel.Attribute(e, kernel.AttrExprName)) != "fib" {
			continue
		}
		flags, _ := kernel.Number(kernel.Attribute(kernel.Attribute(e, kernel.AttrExprData), attrFIBFlags))
		if flags&(fibSource|fibInput) == fibSource|fibInput {
			return true
		}
	}
	return false
}

// isNumber reports whether an attribute is there, with this number.
func isNumber(b []byte, want uint32) bool { //nolint:unparam // what 0 means has a name at each call
	n, is := kernel.Number(b)
	return is && n == want
}
