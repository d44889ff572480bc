package tproxy

import (
	"crypto/rand"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/redirect"
)

// probe asks the kernel, by a transaction that changes nothing, whether it has
// everything that the rules need, and names what is missing.
func (f *filter) probe() error {
	port := []expr.Any{&expr.Immediate{Register: regTarget, Data: []byte{0, 1}}}
	everything := []struct {
		feature redirect.Feature
		exprs   []expr.Any
	}{
		{FeatureNFTables, []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}},
		{FeatureTProxy, slices.Concat(port, toListener(v4))},
		{FeatureTProxy, slices.Concat(port, toListener(v6))},
		{FeatureNoTrack, []expr.Any{&expr.Notrack{}}},
		{FeatureSocket, []expr.Any{&expr.Socket{Key: expr.SocketKeyTransparent, Register: regKey}}},
		{FeatureReject, []expr.Any{rejectOther}},
	}
	rules := make([][]expr.Any, 0, len(everything))
	for _, t := range everything {
		rules = append(rules, t.exprs)
	}
	if f.try(rules...) == nil {
		return nil
	}
	for _, t := range everything {
		if err := f.try(t.exprs); err != nil {
			return explain(err, t.feature)
		}
	}
	return nil
}

// try adds rules to a table that the same transaction removes. Its name is a new
// one, as the transaction would remove somebody else's table too.
func (f *filter) try(rules ...[]expr.Any) error {
	b, err := f.begin()
	if err != nil {
		return err
	}
	scratch := &nftables.Table{Name: f.table.Name + "-probe-" + rand.Text(), Family: nftables.TableFamilyINet}
	b.AddTable(scratch)
	chain := b.AddChain(&nftables.Chain{Name: "probe", Table: scratch})
	for _, exprs := range rules {
		b.AddRule(&nftables.Rule{Table: scratch, Chain: chain, Exprs: exprs})
	}
	b.DelTable(scratch)
	return f.commit(b)
}
