package flow

import (
	"testing"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Connections that the table begins after a process has started, and before that adopts flows, go to
// the next endpoint if theirs refuses them. Their clients need not send again.
func TestConnectionsBeforeAdoptionAreRetried(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	lab.Backends[0].EchoTCP(t, 8080)
	root := netns.MountBPF(t)
	pinned := func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true }
	services := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080))
	n := newNode(t, lab, pinned)
	n.apply(services)
	n.leave()
	n = newNode(t, lab, func(o *Options) { o.BPFRoot, o.Name = root, "test" })
	const clients, refused = 4, 2 // in turn
	asked := make(chan error, clients)
	for range clients {
		go func() {
			_, err := lab.Client.Ask("tcp", vip4+":80")
			asked <- err
		}()
	}
	wait.True(t, "all have begun, and the refusals have come", func() (have bool) {
		n.onLoop(func() {
			n.server.worker.readNotices()
			have = len(n.server.worker.early) >= clients+refused
		})
		return have
	})
	n.apply(services)
	for range clients {
		if err := <-asked; err != nil {
			t.Error(err)
		}
	}
	attempts := 0
	for _, r := range n.wait(t, clients) {
		if attempts += int(r.Attempts); r.End == conntrack.ConnectFailed {
			t.Errorf("%+v", r)
		}
	}
	if attempts != clients+refused {
		t.Errorf("%d attempts, want %d", attempts, clients+refused)
	}
}
