package firewall

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	nft "github.com/google/nftables"
	"github.com/google/nftables/expr"
)

// ForwardPolicies names what judges packets that this node forwards, in nftables
// and iptables, but for kube-proxy's and our own: network policies, for example.
// What clients send through Services does not pass there, as it leaves from
// sockets of this node.
func ForwardPolicies() ([]string, error) {
	found, err := forwardInNFTables()
	legacy, legacyErr := forwardInLegacy()
	return append(found, legacy...), errors.Join(err, legacyErr)
}

// isPasser reports whether a chain is kube-proxy's or ours, which judge no packets of
// others.
func isPasser(chain string) bool {
	return strings.HasPrefix(chain, kubeProxyPrefix) || strings.HasPrefix(chain, "SLUICE-")
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
		case *expr.Reject:
			return true
		}
		return false
	})
}

// judgesForwarded is the same for what iptables-save says.
func judgesForwarded(rules string) bool {
	for line := range strings.Lines(rules) {
		words := strings.Fields(line)
		if len(words) > 1 && words[0] == ":FORWARD" && words[1] == "DROP" {
			return true
		}
		if len(words) < 2 || words[0] != "-A" || words[1] != "FORWARD" {
			continue
		}
		for i, w := range words[:len(words)-1] {
			if target := words[i+1]; (w == "-j" || w == "-g") && target != "ACCEPT" && target != "RETURN" && !isPasser(target) {
				return true
			}
		}
	}
	return false
}

// legacyPatience bounds a call of iptables-legacy-save, which waits for others.
const legacyPatience = 2 * time.Second

// forwardInLegacy looks at the tables of iptables-legacy, if there are any: the
// kernel lists their names, and the program what is in them.
func forwardInLegacy() ([]string, error) {
	var found []string
	var errs []error
	for _, f := range []struct{ names, program string }{
		{"/proc/thread-self/net/ip_tables_names", "iptables-legacy-save"},
		{"/proc/thread-self/net/ip6_tables_names", "ip6tables-legacy-save"},
	} {
		names, err := os.ReadFile(f.names)
		if err != nil || len(bytes.TrimSpace(names)) == 0 {
			continue // no such module, or no table
		}
		ctx, cancel := context.WithTimeout(context.Background(), legacyPatience)
		rules, err := exec.CommandContext(ctx, f.program).Output()
		cancel()
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f.program, err))
			continue
		}
		if judgesForwarded(string(rules)) {
			found = append(found, "FORWARD of "+strings.TrimSuffix(f.program, "-save"))
		}
	}
	return found, errors.Join(errs...)
}
