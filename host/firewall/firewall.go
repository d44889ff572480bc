// Package firewall finds the rules of other programs, such as firewalls and network policy
// engines, in nftables, iptables-nft and iptables-legacy: those that decide about packets
// by the state of their connection, those that judge forwarded packets or look up
// sources, and the engines that are known. Packets that bypass connection tracking have no state.
//
//	rule, err := firewall.StateRule(netns, "sluice")
//
// Rules of kube-proxy and the kubelet do not count: they judge no packets of ours. Nor do
// rules that translate addresses, and rules that only count or log.
package firewall

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	nft "github.com/google/nftables"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// StateRule names a chain with such a rule, or returns "" if there is none. own is the
// name of our nftables table, and begins the names of our chains. netns is a descriptor
// of a network namespace; 0 is the one that it is called in.
func StateRule(netns int, own string) (chain string, err error) {
	err = sys.InNetNS(netns, func() error {
		inNFTables, errNFTables := nftables(own, decidesByState)
		inLegacy, errLegacy := "", error(nil)
		if inNFTables == "" {
			inLegacy, errLegacy = legacy(own)
		}
		chain = cmp.Or(inNFTables, inLegacy)
		return errors.Join(errNFTables, errLegacy)
	})
	if chain != "" {
		return chain, nil
	}
	return "", err
}

// Translation names a chain that may translate the sources of forwarded connections, or returns "" if there is
// none. The parameters are as for StateRule.
func Translation(netns int, own string) (chain string, err error) {
	_, chains, err := Chains(netns)
	for _, c := range chains {
		isOurs := c.Table.Name == kubeProxyTable || c.Table.Name == own && c.Table.Family == nft.TableFamilyINet
		if !isOurs && c.Type == nft.ChainTypeNAT && c.Hooknum != nil && *c.Hooknum == *nft.ChainHookPostrouting {
			return fmt.Sprintf("chain %s of the nftables table %s", c.Name, c.Table.Name), nil
		}
	}
	if err != nil {
		return "", err
	}
	err = sys.InNetNS(netns, func() error {
		return kernel.LegacyTables(func(_ *sys.XTables, program, table string) error {
			if table == "nat" {
				chain = fmt.Sprintf("the table nat of %s-legacy", program)
			}
			return nil
		})
	})
	return chain, err
}

// SourceCheck names a chain of nftables with a rule that looks up the way to packets'
// sources, as firewalld's IPv6_rpfilter does, or returns "" if there is none.
func SourceCheck(own string) (chain string, err error) { return nftables(own, checksSources) }

// counts reports whether a chain is of a program whose rules count. Chains of an engine
// may begin as kube-proxy's and the kubelet's do.
func counts(chain, own string) bool {
	if slices.ContainsFunc(engines, func(e Engine) bool { return e.hasChain(chain) }) {
		return true
	}
	return !strings.HasPrefix(chain, kubeProxyPrefix) && !strings.HasPrefix(chain, strings.ToUpper(strings.ReplaceAll(own, "-", "_"))+"-")
}

// isState reports whether an extension of iptables matches the state of connections.
func isState(match string) bool { return match == "conntrack" || match == "state" }
