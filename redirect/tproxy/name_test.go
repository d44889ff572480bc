package tproxy

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/nftables"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Promise 6: somebody else's table of our name is left alone by Cleanup, and named
// by New. What a killed process of ours left is neither, also if it was made before
// tables were marked.
func TestSomebodyElsesTableOfOurName(t *testing.T) {
	lab := netns.NewLab(t, 0)
	lab.Settle(t)
	opts := Options{Routes: route.Options{NetNS: lab.Node.FD()}}
	conn := must.Get(nftables.New(nftables.WithNetNSFd(lab.Node.FD())))(t)
	table := &nftables.Table{Name: DefaultTable, Family: nftables.TableFamilyINet}
	for _, sets := range []string{"", "allowed", "allowed steer4-1"} {
		conn.AddTable(table)
		for _, name := range strings.Fields(sets) {
			must.OK(t, conn.AddSet(&nftables.Set{Table: table, Name: name, KeyType: nftables.TypeIPAddr}, nil))
		}
		must.OK(t, conn.Flush())
		before := lab.Node.Dump(t)
		var clash *redirect.ClashError
		if _, err := New(opts); !errors.As(err, &clash) || !strings.Contains(err.Error(), "inet sluice is there and not ours") {
			t.Errorf("sets %q: new: %v", sets, err)
		}
		if removed, err := Cleanup(opts); err != nil || len(removed) != 0 {
			t.Errorf("sets %q: cleanup: %q, %v", sets, removed, err)
		}
		check.Textf(t, lab.Node.Dump(t), before, "sets %q: left behind", sets)
		conn.DelTable(table)
		must.OK(t, conn.Flush())
	}
	conn.AddTable(table)
	must.OK(t, conn.AddSet(&nftables.Set{Table: table, Name: "steer4-1", KeyType: nftables.TypeIPAddr}, nil))
	must.OK(t, conn.Flush())
	if removed, err := Cleanup(opts); err != nil || len(removed) != 1 {
		t.Errorf("made before tables were marked: %q, %v", removed, err)
	}
}

// TestProbeRemovesNobodysTable: the table that the probe makes and removes is
// nobody else's, whatever their names are.
func TestProbeRemovesNobodysTable(t *testing.T) {
	lab := netns.NewLab(t, 0)
	lab.Settle(t)
	conn := must.Get(nftables.New(nftables.WithNetNSFd(lab.Node.FD())))(t)
	conn.AddTable(&nftables.Table{Name: DefaultTable + "-probe", Family: nftables.TableFamilyINet})
	must.OK(t, conn.Flush())
	before := lab.Node.Dump(t)
	r := must.Get(New(Options{Routes: route.Options{NetNS: lab.Node.FD()}}))(t)
	must.OK(t, r.Close())
	check.Textf(t, lab.Node.Dump(t), before, "left behind")
}
