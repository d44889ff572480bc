package flow

import (
	"fmt"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// stale lists the indices of endpoints that were given up.
func (n *node) stale() (indices []uint32) {
	n.onLoop(func() {
		for _, f := range n.server.worker.flows {
			if f == nil || f.handshake == nil {
				continue
			}
			for _, s := range f.handshake.stale {
				indices = append(indices, s.index)
			}
		}
	})
	return indices
}

// An index that waits for late answers is in use, though no flow has it: a process that has
// begun a moment ago does not take it for one of those that the last one lost.
func TestIndexOfLateAnswersIsNotReclaimed(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	n.relay.options.Plan = balancer.Plan{Timeouts: []time.Duration{50 * time.Millisecond, patience}, After: patience, Total: patience}
	silent := nobodyAt(t, lab, lab.Backends[0])
	n.apply(svc(vip4, nil, at(silent, 8080), at(silent, 8081)))
	var dialing sync.WaitGroup
	dialing.Go(func() { _, _ = lab.Client.Ask("tcp", vip4+":80") })
	var waiting []uint32
	wait.True(t, "an endpoint that is given up", func() bool {
		waiting = n.stale()
		return len(waiting) == 1
	})
	n.onLoop(func() {
		w := n.server.worker
		w.missing, w.began = waiting, poll.Nanotime()-2*int64(reclaimAfter) // as if it had been given back since the survey
		w.reclaim()
		spare := make([]bool, len(w.flows))
		if w.spares.Mark(spare); spare[waiting[0]] {
			t.Error("the index is free")
		}
	})
	n.finish()
	dialing.Wait()
}

// Each endpoint that was given up takes an index, however often a flow has tried it. They
// leave room for flows.
func TestLateAnswersLeaveRoom(t *testing.T) {
	for _, c := range []struct{ flows, endpoints, clients, most int }{
		{flows: 255, endpoints: 1, clients: 1, most: 1},
		{flows: 32, endpoints: 4, clients: 8, most: 16},
	} {
		t.Run(fmt.Sprint(c.endpoints, " endpoints"), func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			n := newNode(t, lab, func(o *Options) { o.MaxFlows = c.flows })
			short := 20 * time.Millisecond
			n.relay.options.Plan = balancer.Plan{Timeouts: []time.Duration{short, short, short, short, patience}, After: patience, Total: patience}
			ip := nobodyAt(t, lab, lab.Backends[0])
			var silent []netip.AddrPort
			for i := range c.endpoints {
				silent = append(silent, at(ip, uint16(8080+i)))
			}
			n.apply(svc(vip4, nil, silent...))
			var dialing sync.WaitGroup
			for range c.clients {
				dialing.Go(func() { _, _ = lab.Client.Ask("tcp", vip4+":80") })
			}
			wait.True(t, "all attempts", func() (all bool) {
				n.onLoop(func() {
					tried := 0
					for _, f := range n.server.worker.flows {
						if f != nil && f.shared().Attempts == 5 {
							tried++
						}
					}
					all = tried == c.clients
				})
				return all
			})
			if got := len(n.stale()); got == 0 || got > c.most {
				t.Errorf("%d indices, want at most %d", got, c.most)
			}
			n.finish()
			dialing.Wait()
		})
	}
}
