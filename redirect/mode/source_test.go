package mode

import (
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/watch"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// When the source of the node's connections is removed (F8), the routes get another
// one without a call of Verify, which may take long.
func TestRoutesFollowTheirSourceBeforeVerify(t *testing.T) {
	lab := netns.NewLab(t, 0)
	own := netip.MustParseAddr("10.1.0.77")
	prefix := netip.PrefixFrom(own, 32)
	must.OK(t, lab.Node.AddAddr(lab.Client.Name(), prefix))
	router := must.Get(route.Open(route.Options{NetNS: lab.Node.FD()}))(t)
	var c Core
	must.OK(t, c.Open(Steps{}, router, watch.Options{NetNS: lab.Node.FD()}))
	t.Cleanup(func() { _ = c.Close() })
	c.Touched = true // Close removes the routes
	must.OK(t, must.Err(router.Apply(route.State{
		Local:   redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/16")),
		Sources: redirect.Sources{own},
	})))
	source := func(want string) bool {
		lines := must.Get(router.Dump())(t)
		return strings.HasSuffix(strings.Join(lines, "\n"), " src "+want)
	}
	if !source(own.String()) {
		t.Fatal("the routes do not have the source")
	}
	nl := lab.Node.Netlink()
	link := must.Get(nl.LinkByName(lab.Client.Name()))(t)
	a, err := netlink.ParseAddr(prefix.String())
	if err == nil {
		err = nl.AddrDel(link, a)
	}
	must.OK(t, err)
	wait.True(t, "the routes have another source", func() bool { return source(lab.Node.IPv4.String()) })
}

// What is routed here is what a killed process left, until the first plan. A plan that takes
// in an address of this node changes nothing.
func TestRoutedRanges(t *testing.T) {
	lab := netns.NewLab(t, 0)
	open := func(c *Core) {
		router := must.Get(route.Open(route.Options{NetNS: lab.Node.FD()}))(t)
		must.OK(t, c.Open(Steps{Apply: func(p redirect.Plan, _ *redirect.Changes) error {
			c.Set(p)
			return must.Err(router.Apply(route.State{Local: p.Local}))
		}}, router, watch.Options{NetNS: lab.Node.FD()}))
		t.Cleanup(func() { _ = c.Close() })
	}
	plan := func(text string) redirect.Plan {
		return redirect.Plan{Local: redirect.LocalOf(netip.MustParsePrefix(text))}
	}
	routed := func(c *Core, want ...string) {
		t.Helper()
		var got []string
		for _, p := range redirect.Ranges(must.Get(c.Routed())(t)) {
			got = append(got, p.String())
		}
		check.EqualSlices(t, got, want)
	}
	var killed, next Core
	open(&killed)
	routed(&killed)
	must.OK(t, killed.Apply(plan("10.96.0.0/16")))
	killed.Leave()
	open(&next)
	routed(&next, "10.96.0.0/16")
	check.Error(t, next.Apply(plan("10.1.0.0/16")), "takes in this node's own address "+lab.Node.IPv4.String())
	routed(&next, "10.96.0.0/16")
	must.OK(t, next.Apply(plan("10.97.0.0/16")))
	must.OK(t, must.Err(next.Router.Remove())) // a plan in force counts, whatever the kernel has
	routed(&next, "10.97.0.0/16")
	wait.True(t, "the watcher tells of our own change", func() bool { return len(next.Changed()) > 0 })
}

// A Core that cannot watch gives back what its mode opened, and stays closed.
func TestNoWatcher(t *testing.T) {
	lab := netns.NewLab(t, 0)
	noNetNS := must.Get(os.Open(os.DevNull))(t)
	defer noNetNS.Close()
	var c Core
	released := false
	err := c.Open(Steps{Release: func() { released = true }},
		must.Get(route.Open(route.Options{NetNS: lab.Node.FD()}))(t), watch.Options{NetNS: int(noNetNS.Fd())})
	if err == nil || !released {
		t.Errorf("got %v; released: %t", err, released)
	}
	check.ErrorIsf(t, c.Apply(redirect.Plan{}), ErrClosed, "apply")
}
