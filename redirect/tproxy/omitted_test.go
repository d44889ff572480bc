package tproxy

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// Beside a BPF program that finds the sockets, rules that neither the plan nor
// connection tracking needs are not there: what every packet passes is short. They
// come with the need, and no repair is told of.
func TestRulesThatNothingNeedsAreLeftOut(t *testing.T) {
	lab := netns.NewLab(t, 0)
	lab.Settle(t)
	r := newRedirector(t, lab.Node, Options{Lookup: true})
	check := func(what string, wantOutput, wantShort bool) {
		t.Helper()
		now := must.Get(r.filter.reader.contents(r.filter.table.Name))(t)
		output := slices.ContainsFunc(now.chains, func(c *nftables.Chain) bool { return c.Name == chainOutput })
		check.Equalf(t, output, wantOutput, "%s: a hook for what the node sends", what)
		check.Equalf(t, now.rules < len(makeRules(1, numbers{lookup: true})), wantShort, "%s: %d rules", what, now.rules)
		if repaired, err := r.Verify(); repaired || err != nil {
			t.Errorf("%s: verify: %v, %v", what, repaired, err)
		}
	}
	least := steering.Plan()
	least.NodeSourceOnly = true
	foreign := least
	foreign.NonLocal = foreign.NonLocal.With(netip.MustParseAddr("192.0.2.10"), struct{}{})

	apply(t, r, least)
	check("cluster IPs alone", false, true)
	apply(t, r, foreign)
	check("an address that is not ours", true, true)
	apply(t, r, least)
	check("without it", false, true)
	clients := steering.Plan()
	apply(t, r, clients)
	check("clients' own addresses", false, true)
	apply(t, r, least)
	lab.Node.TrackConnections(t)
	if repaired, err := r.Verify(); repaired || err != nil {
		t.Errorf("when tracking begins: verify: %v, %v", repaired, err)
	}
	check("with connection tracking", true, true)
	foreign.NodeSourceOnly = false
	apply(t, r, foreign)
	check("all but a socket on a client's address", true, true)
	steering.HoldClients(t, r, lab.Node.IPv4)
	check("all of it", true, false)

	hooked := func() bool {
		t.Helper()
		now := must.Get(r.filter.reader.contents(r.filter.table.Name))(t)
		return slices.ContainsFunc(now.chains, func(c *nftables.Chain) bool { return c.Name == chainPrerouting })
	}
	looksUp := func() bool {
		return slices.ContainsFunc(makeRules(1, r.filter.numbers), func(one rule) bool {
			return one.chain == chainOf(v4, chainRest) && slices.ContainsFunc(one.exprs, func(e expr.Any) bool {
				_, is := e.(*expr.TProxy)
				return is
			})
		})
	}
	for _, outlived := range []bool{true, false, true} {
		r.Outlived(outlived)
		if repaired, err := r.Verify(); repaired || err != nil {
			t.Errorf("the program outlives the process: %v: verify: %v, %v", outlived, repaired, err)
		}
		if looksUp() == outlived || !hooked() {
			t.Errorf("the program outlives the process: %v: listeners are looked for: %v, hooked: %v", outlived, looksUp(), hooked())
		}
	}
	r = newRedirector(t, netns.NewLab(t, 0).Node, Options{Lookup: true}) // where nothing is tracked
	for _, outlived := range []bool{false, true, false} {
		r.Outlived(outlived)
		apply(t, r, least)
		check("cluster IPs alone", false, true)
		if hooked() == outlived {
			t.Errorf("the program outlives the process: %v: hooked: %v", outlived, hooked())
		}
	}

	plain := newRedirector(t, netns.NewLab(t, 0).Node, Options{})
	apply(t, plain, redirect.Plan{NodeSourceOnly: true})
	if plain.filter.numbers.omitted != (omitted{}) {
		t.Error("without a program that finds sockets, rules are left out")
	}
}
