package firewall

import (
	"errors"
	"fmt"
	"slices"
	"syscall"

	nft "github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// ForwardPolicies names what judges packets that a node forwards, in nftables and iptables, but
// for kube-proxy's and our own: network policies, for example. What the relay sends to endpoints
// does not pass there, as it leaves from sockets of the node. netns is as for StateRule.
func ForwardPolicies(netns int) ([]string, error) {
	f := Forwarded{NetNS: netns}
	return f.Policies()
}

// Forwarded is for who asks for ForwardPolicies again and again: it reads the rules of nftables
// only once they have changed. It is not safe for concurrent use.
type Forwarded struct {
	NetNS      int
	generation string // of nftables, when they were read
	inNFTables []string
}

// Policies is as ForwardPolicies.
func (f *Forwarded) Policies() (found []string, err error) {
	err = sys.InNetNS(f.NetNS, func() error {
		generation, errNFTables := generation()
		if errNFTables == nil && generation != f.generation {
			if f.inNFTables, errNFTables = forwardInNFTables(); errNFTables == nil {
				f.generation = generation
			}
		}
		inLegacy, errLegacy := forwardInLegacy()
		found = slices.Concat(f.inNFTables, inLegacy)
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

// generation returns the number of nftables' last change, or "" where the kernel has no nf_tables.
func generation() (string, error) {
	const attrID = 1 // NFTA_GEN_ID
	nft, err := kernel.OpenNFTables(0)
	if err == nil {
		defer nft.Close()
		var answers []kernel.Object
		if answers, err = nft.Get(syscall.AF_UNSPEC, kernel.GetGen, 0); err == nil && len(answers) > 0 {
			return string(answers[0].Attribute(attrID)), nil
		}
	}
	if NoTables(err) {
		return "", nil
	}
	return "", fmt.Errorf("nftables: generation: %w", err)
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
