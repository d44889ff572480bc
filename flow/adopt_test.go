package flow

import (
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/netns"
)

// A process adopts the previous one's flows when its first policy is in force. A flow that began
// after its start, and has ended, must not be adopted: its index would be released twice.
func TestFirstPolicyFindsFlowsAdopted(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	path := n.server.paths[service.TCP]
	none := path.state.Load()
	var early, enough atomic.Bool
	var look func()
	look = func() { // in each round of the loop
		if path.state.Load() != none && !path.ready {
			early.Store(true)
		}
		if !enough.Load() {
			n.loop.Post(look)
		}
	}
	n.loop.Post(look)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	enough.Store(true)
	if early.Load() {
		t.Error("the policy is in force before the flows are adopted")
	}
}
