package firewall

import (
	"os/exec"
	"strings"
	"testing"

	nft "github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Rules for forwarded packets are found, in nftables' own tables and in those of
// iptables-nft; kube-proxy's and ours are not among them.
func TestForwardPoliciesAreFound(t *testing.T) {
	node := netns.New(t, "node")
	look := func() (found []string) {
		t.Helper()
		must.OK(t, node.Do(func() (err error) {
			found, err = ForwardPolicies(0)
			return err
		}))
		return found
	}
	conn := must.Get(nft.New(nft.WithNetNSFd(node.FD())))(t)
	chain := func(table, name string, to ...string) {
		t.Helper()
		made := conn.AddTable(&nft.Table{Name: table, Family: nft.TableFamilyINet})
		for _, target := range to {
			conn.AddChain(&nft.Chain{Table: made, Name: target})
		}
		base := conn.AddChain(&nft.Chain{Table: made, Name: name, Type: nft.ChainTypeFilter,
			Hooknum: nft.ChainHookForward, Priority: nft.ChainPriorityFilter})
		for _, target := range to {
			conn.AddRule(&nft.Rule{Table: made, Chain: base, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: target}}})
		}
		must.OK(t, conn.Flush())
	}
	chain("kube-proxy", "filter-forward", "services")
	chain("filter", "FORWARD", "KUBE-FORWARD", "SLUICE-FORWARD")
	chain("empty", "forward")
	if found := look(); len(found) != 0 {
		t.Errorf("found %q where nothing is", found)
	}
	chain("policies", "forward", "egress")
	want := []string{"chain forward of the nftables table policies"}
	check.EqualSlicesf(t, look(), want, "found")
}

// TestForwardPolicies plays the rules that count, and those that do not.
func TestForwardPolicies(t *testing.T) {
	forward := func(rule string) string {
		return "table inet x {\nchain other {\n}\nchain f {\ntype filter hook forward priority 0\n" + rule + "\n}\n}\n"
	}
	save := func(rules string) string { return "*filter\n" + rules + "\nCOMMIT\n" }
	nft, legacy := []string{"nft", "-f", "-"}, []string{"iptables-legacy-restore"}
	const table = "chain f of the nftables table x"
	for _, c := range []struct {
		name, text string
		program    []string
		want       string
	}{
		{"accepts", forward("ip saddr 10.0.0.1 accept"), nft, ""},
		{"drops", forward("ip saddr 10.0.0.1 drop"), nft, table},
		{"a map of verdicts", forward("ct state vmap { established : accept, invalid : drop }"), nft, table},
		{"a set", forward("ip saddr { 10.0.0.1 } accept"), nft, ""},
		{"a jump", forward("jump other"), nft, table},
		{"the policy", "table inet x {\nchain f {\ntype filter hook forward priority 0\npolicy drop\n}\n}\n", nft, table},
		{"another hook", "table inet x {\nchain f {\ntype filter hook input priority 0\ndrop\n}\n}\n", nft, ""},
		{"iptables-nft, REJECT", save("-A FORWARD -s 10.0.0.1 -j REJECT"), []string{"iptables-nft-restore"}, "chain FORWARD of the nftables table filter"},
		{"kube-router", save(":KUBE-ROUTER-FORWARD - [0:0]\n-A FORWARD -j KUBE-ROUTER-FORWARD"), []string{"iptables-nft-restore"}, "chain FORWARD of the nftables table filter"},
		{"legacy", save(":KUBE-FORWARD - [0:0]\n-A FORWARD -j KUBE-FORWARD\n-A FORWARD -j ACCEPT\n-A INPUT -j DROP"), legacy, ""},
		{"legacy, policy", save(":FORWARD DROP [0:0]"), legacy, "FORWARD of the table filter of iptables-legacy"},
		{"legacy, drops", save("-A FORWARD -s 10.0.0.1/32 -j DROP"), legacy, "FORWARD of the table filter of iptables-legacy"},
		{"legacy, a jump", save(":other - [0:0]\n:cali-FORWARD - [0:0]\n-A FORWARD -j cali-FORWARD"), legacy, "FORWARD of the table filter of iptables-legacy"},
		{"legacy, IPv6", save("-A FORWARD -j REJECT"), []string{"ip6tables-legacy-restore"}, "FORWARD of the table filter of ip6tables-legacy"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := exec.LookPath(c.program[0]); err != nil {
				t.Skip("SKIP-NEEDS: " + c.program[0])
			}
			node := netns.NewLab(t, 0).Node
			load(t, node, c.text, c.program[0], c.program[1:]...)
			found, err := ForwardPolicies(node.FD())
			if got := strings.Join(found, ", "); err != nil || got != c.want {
				t.Errorf("%q, %v; want %q", got, err, c.want)
			}
		})
	}
}
