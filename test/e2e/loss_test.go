package e2e

import (
	"testing"

	"github.com/sluice-proxy/sluice/test/netns"
)

// TestConnectionsEndDespiteLoss: one of 32 longer packets of clients and endpoints gets lost. Each
// connection that the kernel forwards ends when its sides have ended it, with a record that says how.
func TestConnectionsEndDespiteLoss(t *testing.T) {
	t.Parallel()
	m := newMovers(t, mode{}, 1, 1, 0, "--datapath", "kernel")
	for _, h := range append([]*netns.Host{m.lab.Client}, m.lab.Backends...) {
		h.Lose(t, "eth0", 200, 32)
	}
	const talkers, talks = 16, 300
	m.talk(t, talkers)
	m.talked(t, talks)
	m.end(t)
	m.checkRecords(t)
}
