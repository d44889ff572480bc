package flow

import (
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// A flow that finds no room for one of its tuples leaves none of the others.
func TestNoRoomInTheIndex(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		t.Run(map[bool]string{false: "client's address", true: "hidden"}[hidden], func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			n := newNode(t, lab, func(o *Options) { o.ask = true })
			n.config.MasqueradeAll = hidden
			n.relay.options.Plan = balancer.Plan{Timeouts: []time.Duration{time.Second}, After: time.Second, Total: time.Second}
			n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
			client := &net.TCPAddr{IP: lab.Client.IPv4.AsSlice(), Port: 45678}
			key := bpf.TupleOf(syscall.IPPROTO_TCP, netip.AddrPortFrom(lab.Client.IPv4, 45678), netip.MustParseAddrPort(vip4+":80"))
			index := &n.server.kernel.Index
			const slots = bpf.Places * len(bpf.KernelBucket{}.Slot)
			fill := func(slot uint64) {
				for n := range bpf.Places {
					b := index.Place(index.Hash(&key), n)
					for i := range b.Slot {
						b.Slot[i] = slot
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
			check.Equalf(t, must.Get(lab.Client.Ask("tcp", vip4+":80"))(t), "b1:8080", "with room again")
		})
	}
}
