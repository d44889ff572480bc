package attach

import (
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/foreign"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestFilters: filters of clsact stand beside those of others, come back when somebody removes
// them, and leave nothing.
func TestFilters(t *testing.T) {
	lab := netns.NewLab(t, 1)
	nl, index := lab.Node.Netlink(), lab.Node.Link(t, "client").Attrs().Index
	must.OK(t, nl.QdiscAdd(clsact(index)))
	if err := nl.FilterReplace(&netlink.BpfFilter{ // another program's, of the same priority
		FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: netlink.HANDLE_MIN_INGRESS, Handle: 1, Priority: 1, Protocol: syscall.ETH_P_ALL},
		Fd:          foreign.Idle(t).FD(), Name: "others", DirectAction: true,
	}); err != nil {
		t.Fatal(err)
	}
	i := opened(t, lab.Node, func(o *Options) { o.Filters = true })
	own, others := ownFilters(nl, index, netlink.HANDLE_MIN_EGRESS)
	if own == nil || others != 0 {
		t.Fatalf("at egress: %v, and %d others", own, others)
	}
	must.OK(t, nl.FilterDel(own))
	wait.True(t, "the filters are there again", func() bool { // both are replaced, one after the other
		egress, _ := ownFilters(nl, index, netlink.HANDLE_MIN_EGRESS)
		ingress, _ := ownFilters(nl, index, netlink.HANDLE_MIN_INGRESS)
		return egress != nil && ingress != nil
	})
	i.Close(false)
	for _, side := range []side{ingressSide, egressSide} {
		if own, _ := ownFilters(nl, index, side.parent); own != nil {
			t.Errorf("%s: %v is left", side.name, own)
		}
	}
	if _, others := ownFilters(nl, index, netlink.HANDLE_MIN_INGRESS); others != 1 {
		t.Errorf("%d filters of others are left", others)
	}
	// Where the queueing discipline was ours, it is gone.
	qdiscs := must.Get(nl.QdiscList(lab.Node.Link(t, "b1")))(t)
	for _, q := range qdiscs {
		if strings.Contains(q.Type(), "clsact") {
			t.Errorf("%v is left", q)
		}
	}
}
