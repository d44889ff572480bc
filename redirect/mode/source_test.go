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
