package firewall

import (
	"slices"
	"testing"

	nft "github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/test/netns"
)

// Rules for forwarded packets are found, in nftables' own tables and in those of
// iptables-nft; kube-proxy's and ours are not among them.
func TestForwardPoliciesAreFound(t *testing.T) {
	node := netns.New(t, "node")
	look := func() (found []string) {
		t.Helper()
		if err := node.Do(func() (err error) {
			found, err = ForwardPolicies()
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return found
	}
	conn, err := nft.New(nft.WithNetNSFd(node.FD()))
	if err != nil {
		t.Fatal(err)
	}
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
		if err := conn.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	chain("kube-proxy", "filter-forward", "services")
	chain("filter", "FORWARD", "KUBE-FORWARD", "SLUICE-FORWARD")
	chain("empty", "forward")
	if found := look(); len(found) != 0 {
		t.Errorf("found %q where nothing is", found)
	}
	chain("policies", "forward", "egress")
	want := []string{"chain forward of the nftables table policies"}
	if found := look(); !slices.Equal(found, want) {
		t.Errorf("found %q, want %q", found, want)
	}
	for rules, want := range map[string]bool{
		":FORWARD ACCEPT [0:0]\n-A FORWARD -m comment --comment x -j KUBE-FORWARD\n-A FORWARD -j ACCEPT\n": false,
		":FORWARD DROP [0:0]\n": true,
		":FORWARD ACCEPT [0:0]\n-A FORWARD -s 10.0.0.1/32 -j DROP\n": true,
		":FORWARD ACCEPT [0:0]\n-A FORWARD -j cali-FORWARD\n":        true,
		":INPUT DROP [0:0]\n-A INPUT -j DROP\n":                      false,
	} {
		if judgesForwarded(rules) != want {
			t.Errorf("%q: want %t", rules, want)
		}
	}
}
