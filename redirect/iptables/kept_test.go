package iptables

import (
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// TestConnectionsToEndpointsAreKept where rules look at their state.
func TestConnectionsToEndpointsAreKept(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		steering.Kept(t, func(t testing.TB, node *netns.Host) redirect.Redirector { return newOne(t, node, opts) })
	})
}
