package sklookup

import (
	"os"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

func optionsOf(node *netns.Host) Options {
	return Options{Routes: route.Options{NetNS: node.FD()}, ReplyPorts: [2]uint16{61000, 65534}}
}

// newRedirector makes one inside the node; the test closes it.
func newRedirector(t testing.TB, node *netns.Host) *Redirector {
	t.Helper()
	r, err := New(optionsOf(node))
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestSteering(t *testing.T) {
	steering.Run(t, steering.Mode{
		New: func(t testing.TB, node *netns.Host) redirect.Redirector { return newRedirector(t, node) },
		Kill: func(_ testing.TB, r redirect.Redirector) {
			r.(*Redirector).touched = false
			_ = r.Close()
		},
		Cleanup:        func(node *netns.Host) ([]string, error) { return Cleanup(optionsOf(node)) },
		ForeignSilent:  true,
		LingeringStays: true,
	})
}
