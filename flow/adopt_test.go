package flow

import (
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
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

// A connection's record says when it began, also after another process has adopted the connection.
func TestAdoptedConnectionKeepsItsTime(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	root := netns.MountBPF(t)
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080))
	n := newNode(t, lab, func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true })
	n.apply(services)
	before := time.Now()
	c := lab.Client.Connect(t, "tcp", vip4+":80")
	after := time.Now()
	defer c.Close()
	began := func(whose string) {
		// A thread that is stopped between two clocks makes a time earlier, never later.
		if wall := time.Unix(0, n.listed().Wall); wall.After(after) || wall.Before(before.Add(-patience)) {
			t.Errorf("%s process says %v; the client connected from %v to %v", whose, wall, before, after)
		}
	}
	began("the first")
	n.leave()
	n = newNode(t, lab, func(o *Options) { o.BPFRoot, o.Name = root, "test" })
	n.apply(services)
	began("the next")
}

// Of two flows with one tuple, which two other versions have kept, the one that began later goes on.
func TestOlderFlowGivesWay(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, nil)
	of := func(endpoint int, started uint64) *bpf.KernelFlow {
		return &bpf.KernelFlow{
			Protocol: syscall.IPPROTO_TCP, State: bpf.KernelStateOPEN, Started: started,
			Client: bpf.AddressOf(lab.Client.IPv4), Vip: bpf.AddressOf(netip.MustParseAddr(vip4)), Endpoint: bpf.AddressOf(lab.Backends[endpoint].IPv4),
			ClientPort: bpf.Wire(40000), MiddlePort: bpf.Wire(40000), VipPort: bpf.Wire(80), EndpointPort: bpf.Wire(8080),
		}
	}
	n.onLoop(func() {
		w := n.server.worker
		older, newer := w.put(of(0, 1)), w.put(of(1, 2))
		if older == nil || newer == nil {
			t.Error("there is no room")
			return
		}
		check.Equal(t, older.State, bpf.KernelStateFREE)
		check.Equal(t, newer.State, bpf.KernelStateOPEN)
		check.Equal(t, w.left, 1)
		key := bpf.TupleOf(syscall.IPPROTO_TCP, at(lab.Client.IPv4, 40000), netip.MustParseAddrPort(vip4+":80"))
		index := w.kernel.Index.Find(&key).Flow()
		check.Equal(t, &w.kernel.Flows[index], newer)
		n.server.stats.open.Add(1) // free counts it
		w.free(index)
		w.left--
	})
}
