package tproxy

import (
	"testing"

	"github.com/google/nftables"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// What the kernel has counted is no change of the table, and is told once, also after the
// table is filled again.
func TestCountsAreNoDamage(t *testing.T) {
	lab := netns.NewLab(t, 0)
	none := tcp("10.96.0.11:80")
	r := newRedirector(t, lab.Node, Options{})
	apply(t, r, steering.Plan(steering.Refuse(none)))
	count := func(want uint64) {
		t.Helper()
		must.Equal(t, steering.Reach(t, lab.Client, none, steering.Refused), steering.Refused)
		told, err := r.Refused()
		if err != nil || len(told.New) != 1 || told.New[0].Packets != 1 || told.Totals != [...]uint64{want, 0, 0, 0} {
			t.Errorf("told %+v, %v, want one packet of %d", told, err, want)
		}
	}
	count(1)
	count(2)
	conn := must.Get(nftables.New(nftables.WithNetNSFd(lab.Node.FD())))(t)
	conn.AddTable(&nftables.Table{Name: "theirs", Family: nftables.TableFamilyINet})
	must.OK(t, conn.Flush())
	if repaired, err := r.Verify(); repaired || err != nil {
		t.Errorf("beside somebody else's table: repaired %v, %v", repaired, err)
	}
	count(3)
	conn.FlushRuleset()
	must.OK(t, conn.Flush())
	if repaired, err := r.Verify(); !repaired || err != nil {
		t.Errorf("without a table: repaired %v, %v", repaired, err)
	}
	count(4)
}
