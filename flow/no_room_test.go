package flow

import (
	"net"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// A flow that finds no room for one of its tuples leaves none of the others.
func TestNoRoomInTheIndex(t *testing.T) {
	for _, hidden := range []bool{false, true} {
		t.Run(map[bool]string{false: "client's address", true: "hidden"}[hidden], func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			n := newNode(t, lab, func(o *Options) { o.ask = true })
			n.config.MasqueradeAll = hidden
			n.relay.options.Plan = balancer.Plan{Timeouts: []time.Duration{time.Second}, After: time.Second, Total: time.Second}
			n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
			client := &net.TCPAddr{IP: lab.Client.IPv4.AsSlice(), Port: 45678}
			buckets := n.server.kernel.Index.Buckets
			slots := len(buckets) * len(buckets[0].Slot)
			fill := func(slot uint64) {
				for i := range buckets {
					for j := range buckets[i].Slot {
						buckets[i].Slot[j] = slot
					}
				}
			}
			const nobody = 1<<63 | bpf.MostFlows
			fill(nobody)
			dialled := make(chan struct{})
			go func() {
				defer close(dialled)
				if c, err := lab.Client.Dialer(&net.Dialer{LocalAddr: client}, "tcp", vip4+":80"); err == nil {
					t.Error("it is served")
					_ = c.Close()
				}
			}()
			wait.True(t, "a packet that cannot be put back", func() bool { return n.server.Stats().Lost > 0 })
			if got := n.entries(); got != slots {
				t.Errorf("%d tuples are entered, besides those of nobody", got-slots)
			}
			<-dialled
			fill(0)
			if said, err := lab.Client.Ask("tcp", vip4+":80"); err != nil || said != "b1:8080" {
				t.Errorf("with room again: %q, %v", said, err)
			}
		})
	}
}
