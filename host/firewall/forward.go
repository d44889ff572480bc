package firewall

import (
	"errors"
	"fmt"
	"slices"

	nft "github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// ForwardPolicies names what judges packets that a node forwards, in nftables and iptables, but
// for kube-proxy's and our own: network policies, for example. What the relay sends to endpoints
// does not pass there, as it leaves from sockets of the node. netns is as for StateRule.
func ForwardPolicies(netns int) (found []string, err error) {
	err = sys.InNetNS(netns, func() error {
		inNFTables, errNFTables := forwardInNFTables()
		inLegacy, errLegacy := forwardInLegacy()
		found = append(inNFTables, inLegacy...)
		return errors.Join(errNFTables, errLegacy)
	})
	return found, err
}

// isPasser reports whether a chain is kube-proxy's or ours, which judge no packets of
// others.
func isPasser(chain string) bool { return !counts(chain, "sluice") }

// decides reports whether an extension of iptables decides about packets.
func decides(target string) bool {
	return slices.Contains([]string{"REJECT", "NFQUEUE", "QUEUE", "TARPIT"}, target)
}

func forwardInNFTables() ([]string, error) {
	conn, chains, err := Chains(0)
	if err != nil {
		return nil, err
	}
	var found []string
	for _, c := range chains {
		ip := c.Table.Family == nft.TableFamilyIPv4 || c.Table.Family == nft.TableFamilyIPv6 || c.Table.Family == nft.TableFamilyINet
		if !ip || c.Hooknum == nil || *c.Hooknum != *nft.ChainHookForward || c.Table.Name == kubeProxyTable {
			continue
		}
		judges := c.Policy != nil && *c.Policy == nft.ChainPolicyDrop
		if !judges {
			rules, err := conn.GetRules(c.Table, c)
			if err != nil {
				return found, fmt.Errorf("nftables: %w", err)
			}
			judges = slices.ContainsFunc(rules, judgesPackets)
		}
		if judges {
			found = append(found, fmt.Sprintf("chain %s of the nftables table %s", c.Name, c.Table.Name))
		}
	}
	return found, nil
}

// judgesPackets reports whether a rule decides about packets, or has a chain do so.
func judgesPackets(r *nft.Rule) bool {
	return slices.ContainsFunc(r.Exprs, func(e expr.Any) bool {
		switch e := e.(type) {
		case *expr.Verdict:
			return e.Kind == expr.VerdictDrop || (e.Kind == expr.VerdictJump || e.Kind == expr.VerdictGoto) && !isPasser(e.Chain)
		case *expr.Lookup:
			return e.IsDestRegSet && e.DestRegister == 0 // a map of verdicts
		case *expr.Target:
			return decides(e.Name)
		case *expr.Reject, *expr.Queue:
			return true
		}
		return false
	})
}

// forwardInLegacy looks at the tables of iptables-legacy, if there are any.
func forwardInLegacy() (found []string, err error) {
	const forward = 2 // NF_INET_FORWARD
	err = kernel.LegacyTables(func(x *sys.XTables, program, table string) error {
		targets, err := x.Targets(table, forward)
		if slices.ContainsFunc(targets, judges) {
			found = append(found, fmt.Sprintf("FORWARD of the table %s of %s-legacy", table, program))
		}
		return err
	})
	return found, err
}

// judges reports whether a rule of iptables-legacy decides about packets, or has a chain do so.
func judges(t sys.XTablesTarget) bool {
	return t.IsChain && !isPasser(t.Name) || !t.IsChain && (t.Name == "DROP" || decides(t.Name))
}
