package iptables

import (
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// The scenes that every mode plays.
func TestSteering(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		steering.Run(t, steering.Mode{
			Uncounted: true,
			New: func(t testing.TB, node *netns.Host) redirect.Redirector {
				o := opts
				o.Routes.NetNS = node.FD()
				return must.Get(New(o))(t)
			},
			Kill: func(_ testing.TB, r redirect.Redirector) {
				r.(*Redirector).Touched = false
				_ = r.Close()
			},
			Cleanup: func(node *netns.Host) ([]string, error) {
				o := opts
				o.Routes.NetNS = node.FD()
				return Cleanup(o)
			},
			OwnLingeringRefuses: true,
			Renumbers:           true,
		})
	})
}
