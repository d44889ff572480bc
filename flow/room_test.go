package flow

import (
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// openSessions opens UDP sessions, and expects an answer in each.
func openSessions(t *testing.T, lab *netns.Lab, n int) []net.Conn {
	t.Helper()
	var conns []net.Conn
	for range n {
		c := lab.Client.Connect(t, "udp", vip4+":80")
		must.OK(t, must.Err(question(c)))
		conns = append(conns, c)
	}
	return conns
}

// onLoop calls f on the node's loop.
func (n *node) onLoop(f func()) {
	n.t.Helper()
	done := make(chan struct{})
	if !n.loop.Post(func() { f(); close(done) }) {
		n.t.Fatal("the loop has ended")
	}
	<-done
}

// awaitQuiet waits until userspace knows so many sessions, and all but busy may be replaced
// and have ended their handshake.
func (n *node) awaitQuiet(open int64, busy netip.AddrPort) {
	n.t.Helper()
	wait.For(n.t, "sessions are quiet", patience, func() (err error) {
		if got := n.server.Stats().Open; got != open {
			return fmt.Errorf("%d sessions are known, want %d", got, open)
		}
		n.onLoop(func() {
			for _, f := range n.server.worker.flows {
				if f == nil || f.record.Client == busy {
					continue
				}
				if !f.isEvictable(poll.Nanotime()) || f.handshake != nil {
					err = fmt.Errorf("%s is not", f.record.Client)
				}
			}
		})
		return err
	})
}

// keepBusy makes a session look always in use. It reports whether there is one.
func (n *node) keepBusy(client netip.AddrPort) (found bool) {
	n.t.Helper()
	n.onLoop(func() {
		for _, f := range n.server.worker.flows {
			if f != nil && f.record.Client == client {
				atomic.StoreUint64(&f.shared().Way[0].Last, ^uint64(0)>>2)
				found = true
			}
		}
	})
	return found
}

// endedBy counts the records with an end.
func (n *node) endedBy(end conntrack.End) (count int) {
	for _, r := range n.taken() {
		if r.End == end {
			count++
		}
	}
	return count
}

// Where a service port's part of the table is full, new UDP sessions replace old ones that
// are quiet. One that is in use stays, and nobody goes to the relay.
func TestNewSessionsReplaceQuietOnes(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		const all, share = 16, 14 // of one service port; the others are for others
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoUDP(t, 8080)
		n := newNode(t, lab, func(o *Options) { by(o); o.MaxFlows = all })
		n.forgetsSoon()
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
		first := openSessions(t, lab, share)[0]
		busy := netip.MustParseAddrPort(first.LocalAddr().String())
		for range 3 {
			wait.True(t, "the first session is known", func() bool { return n.keepBusy(busy) })
			n.awaitQuiet(share, busy)
			openSessions(t, lab, share-1)
		}
		n.finish()
		if s := n.server.Stats(); s.PassedAll != 0 || s.Lost != 0 {
			t.Errorf("%d packets went to the relay, %d were lost", s.PassedAll, s.Lost)
		}
		check.Equalf(t, n.endedBy(conntrack.Evicted), 3*(share-1), "sessions were replaced")
		for _, r := range n.taken() {
			if r.Client == busy && r.End == conntrack.Evicted {
				t.Errorf("the session that was in use was replaced: %+v", r)
			}
		}
	})
}

// A client that has most of the node's ports towards an endpoint, in sessions that are in use or
// unanswered, does not keep others from their part. It keeps its own part.
func TestNoClientTakesAllPorts(t *testing.T) {
	t.Parallel()
	for _, answered := range []bool{false, true} {
		t.Run(fmt.Sprintf("answered=%t", answered), func(t *testing.T) {
			ports, part := 64, 16
			if full() {
				ports, part = bpf.LastPort-bpf.FirstPort+1, 50
			}
			lab := netns.NewLab(t, 2)
			lab.Backends[0].EchoUDP(t, 8080)
			n := newNode(t, lab, func(o *Options) { o.MaxFlows, o.ask = max(o.MaxFlows, 2*ports), true })
			n.forgetsSoon()
			n.config.MasqueradeAll = true
			n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
			n.onLoop(func() { n.server.worker.ports.count = ports })
			openSessions(t, lab, ports)
			n.awaitQuiet(int64(ports), netip.AddrPort{})
			n.onLoop(func() {
				for _, f := range n.server.worker.flows {
					switch {
					case f == nil:
					case answered:
						atomic.StoreUint64(&f.shared().Way[0].Last, ^uint64(0)>>2) // as if it were always in use
					default:
						f.setState(bpf.KernelStateASKING)
					}
				}
			})
			for range part {
				c := lab.Backends[1].Connect(t, "udp", vip4+":80")
				must.OK(t, must.Err(question(c)))
			}
			n.finish()
			if got, s := n.endedBy(conntrack.Evicted), n.server.Stats(); got != part || s.Lost != 0 {
				t.Errorf("%d sessions were replaced, want %d; %d packets were lost", got, part, s.Lost)
			}
		})
	}
}

// Clients whose address is hidden get ports of the node. Where these run out, new UDP
// sessions take those of quiet ones.
func TestSessionsTakeThePortsOfQuietOnes(t *testing.T) {
	t.Parallel()
	const ports = 4
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoUDP(t, 8080)
	n := newNode(t, lab, func(o *Options) { o.ask = true })
	n.forgetsSoon()
	n.config.MasqueradeAll = true
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	n.onLoop(func() { n.server.worker.ports.count = ports; n.server.worker.ports.at = 0 })
	for range 3 {
		openSessions(t, lab, ports)
		n.awaitQuiet(int64(ports), netip.AddrPort{})
	}
	n.stop() // all records are written then
	n.left = true
	n.end()
	if got, s := n.endedBy(conntrack.Evicted), n.server.Stats(); got != 2*ports || s.Lost != 0 {
		t.Errorf("%d sessions were replaced, want %d; %d packets were lost", got, 2*ports, s.Lost)
	}
}
