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
	if err := lab.Node.AddAddr(lab.Client.Name(), prefix); err != nil {
		t.Fatal(err)
	}
	router, err := route.Open(route.Options{NetNS: lab.Node.FD()})
	if err != nil {
		t.Fatal(err)
	}
	var c Core
	if err := c.Open(Steps{}, router, watch.Options{NetNS: lab.Node.FD()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	c.Touched = true // Close removes the routes
	if _, err := router.Apply(route.State{
		Local:   redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/16")),
		Sources: redirect.Sources{own},
	}); err != nil {
		t.Fatal(err)
	}
	source := func(want string) bool {
		lines, err := router.Dump()
		if err != nil {
			t.Fatal(err)
		}
		return strings.HasSuffix(strings.Join(lines, "\n"), " src "+want)
	}
	if !source(own.String()) {
		t.Fatal("the routes do not have the source")
	}
	nl := lab.Node.Netlink()
	link, err := nl.LinkByName(lab.Client.Name())
	if err != nil {
		t.Fatal(err)
	}
	a, err := netlink.ParseAddr(prefix.String())
	if err == nil {
		err = nl.AddrDel(link, a)
	}
	if err != nil {
		t.Fatal(err)
	}
	wait.True(t, "the routes have another source", func() bool { return source(lab.Node.IPv4.String()) })
}
