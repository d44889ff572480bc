package flow

import (
	"net"
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestWorkerSleeps: while no notices come, the worker wakes for its heartbeat alone, also with an open
// connection. The next notice wakes it.
func TestWorkerSleeps(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	held := lab.Client.Connect(t, "tcp", vip4+":80")
	wait.True(t, "the connection's record is parked", n.isParked)
	const beats = 4
	beat := func() uint64 { return atomic.LoadUint64(&n.server.kernel.Control.Beat) }
	waits, at := n.loop.Waits(), beat()
	for range beats {
		wait.True(t, "a heartbeat", func() bool { return beat() != at })
		at = beat()
	}
	if waits = n.loop.Waits() - waits; waits > 8*beats {
		t.Errorf("the loop has waited %d times during %d heartbeats", waits, beats)
	}

	n.onLoop(func() { n.loop.Cancel(&n.server.worker.beat) }) // BPF believes in the last one for long
	n.awaitAsleep()
	n.expectDecided("a connection that BPF begins", 1, 0, func() { lab.Client.Connect(t, "tcp", vip4+":80") })
	wait.True(t, "the worker follows it", func() bool { return n.server.Stats().Open == 2 })
	n.awaitAsleep()
	check.OK(t, held.Close())
	n.wait(t, 1)

	n.awaitAsleep()
	var last net.Conn
	var err error
	n.onLoop(func() {
		last, err = lab.Client.Dial("tcp", vip4+":80")
		n.server.worker.HandleEvents(upcallTag, 0) // reads the notice before its event
	})
	must.OK(t, err)
	n.awaitAsleep()
	check.OK(t, last.Close())
}

// awaitAsleep waits until nothing but a notice makes the worker read notices.
func (n *node) awaitAsleep() {
	n.t.Helper()
	wait.True(n.t, "the worker sleeps", func() (sleeps bool) {
		n.onLoop(func() {
			sleeps = atomic.LoadUint32(&n.server.kernel.Control.Sleeps) == 1 && !n.server.worker.tick.Scheduled()
		})
		return sleeps
	})
}
