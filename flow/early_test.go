package flow

import (
	"fmt"
	"net"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Connections that the table begins between a process's start and its adoption of flows go to the
// next endpoint if theirs refuses them. Their clients need not send again.
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
	connected := make(chan net.Conn, clients)
	for range clients {
		go func() {
			c, err := lab.Client.Dial("tcp", vip4+":80")
			check.OK(t, err)
			connected <- c
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
	attempts := 0
	n.onLoop(func() {
		for _, f := range n.server.worker.flows {
			if f != nil {
				attempts += int(f.shared().Attempts)
			}
		}
	})
	check.Equalf(t, attempts, clients+refused, "attempts before a client's next SYN")
	for range clients {
		if c := <-connected; c != nil {
			must.OK(t, c.Close())
		}
	}
	for _, r := range n.wait(t, clients) {
		if r.End == conntrack.ConnectFailed {
			t.Errorf("%+v", r)
		}
	}
}

// A handshake survives the end of the process that has its SYN: if the endpoint refuses it, or has
// another connection with its ports, the client's next SYN goes to the next endpoint. There is one
// record.
func TestHandshakesGoOnInTheNextProcess(t *testing.T) {
	t.Parallel()
	for _, flows := range []int{4096, 2048} { // the maps' size is of their version
		for _, refuses := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d flows, refuses %v", flows, refuses), func(t *testing.T) { testHandshake(t, flows, refuses) })
		}
	}
}

func testHandshake(t *testing.T, flows int, refuses bool) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	for _, b := range lab.Backends {
		b.EchoTCP(t, 8080)
	}
	silent := lab.Backends[0]
	silent.NFT(t, "add table inet silent; add chain inet silent in { type filter hook input priority 0; }; add rule inet silent in tcp dport 8080 drop")
	root := netns.MountBPF(t)
	n := newNode(t, lab, func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", true })
	n.serve(0)
	asked := make(chan error, 1)
	go func() {
		_, err := lab.Client.Ask("tcp", vip4+":80")
		asked <- err
	}()
	var had bpf.KernelFlow
	wait.True(t, "the process has the SYN", func() bool {
		n.onLoop(func() {
			n.server.worker.readNotices()
			for _, f := range n.server.worker.flows {
				if f != nil && f.handshake != nil && len(f.handshake.data) > 0 {
					had = *f.shared()
				}
			}
		})
		return had.ClientPort != 0
	})
	n.leave()
	n = newNode(t, lab, func(o *Options) { o.BPFRoot, o.Name, o.MaxFlows = root, "test", flows })
	if n.serve(0, 1); !refuses {
		silent.NFT(t, "delete table inet silent")
	}
	endpoint, client := at(silent.IPv4, 8080), netip.AddrPortFrom(lab.Client.IPv4, bpf.PortOf(had.Client, had.MiddlePort).Port())
	if refuses {
		sendSegment(t, silent, endpoint, client, 0, had.FirstSequence+1, flagRST|flagACK)
	} else {
		sendSegment(t, silent, endpoint, client, 1, had.FirstSequence-1, flagACK)
	}
	check.OK(t, <-asked)
	for _, r := range n.wait(t, 1) {
		if r.End != conntrack.ClientFin && r.End != conntrack.EndpointFin || refuses && r.Attempts != 2 {
			t.Errorf("%+v", r)
		}
	}
}
