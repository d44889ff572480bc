package tproxy

import (
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// The scenes that every mode plays. This one has none of the limits.
func TestSteering(t *testing.T) {
	t.Parallel()
	optionsOf := func(node *netns.Host) Options { return Options{Routes: route.Options{NetNS: node.FD()}} }
	steering.Run(t, steering.Mode{
		New: func(t testing.TB, node *netns.Host) redirect.Redirector {
			return must.Get(New(optionsOf(node)))(t)
		},
		Kill: func(_ testing.TB, r redirect.Redirector) {
			r.(*Redirector).Touched = false
			_ = r.Close()
		},
		Cleanup:   func(node *netns.Host) ([]string, error) { return Cleanup(optionsOf(node)) },
		Renumbers: true, // generations of sets
	})
}
