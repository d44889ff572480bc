package flow

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Datagrams that a client sends before its endpoint has refused the first one reach the next
// endpoint too, in their order, and count once.
func TestDatagramsBeforeARefusalAreSentAgain(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		forDeciders(t, func(t *testing.T, by func(*Options)) {
			lab := netns.NewLab(t, 3)
			lab.Backends[2].EchoUDP(t, 8080)
			n := newNode(t, lab, by)
			n.config.MasqueradeAll = hidden
			for sessions := 1; ; sessions++ {
				// Nobody has failed yet, as far as this balancer knows.
				n.apply(svc(fmt.Sprintf("10.96.0.%d", sessions), nil,
					at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080), at(lab.Backends[2].IPv4, 8080)))
				sendInARow(t, n, fmt.Sprintf("10.96.0.%d:80", sessions))
				n.apply(svc(fmt.Sprintf("10.96.0.%d", sessions), nil))
				wait.True(t, "a record", func() bool { return len(n.taken()) == sessions })
				r := n.taken()[sessions-1]
				if r.DatagramsFromClient != bpf.MostUnanswered || r.BytesFromClient != 5*bpf.MostUnanswered || r.DatagramsFromEndpoint != bpf.MostUnanswered || r.Path != conntrack.Kernel {
					t.Errorf("hidden %v: %+v", hidden, r)
				}
				if len(r.Failed) > 0 {
					return
				}
			}
		})
	}
}

// sendInARow sends as many datagrams as are kept while the loop does nothing else, and wants
// an answer to each.
func sendInARow(t *testing.T, n *node, to string) {
	t.Helper()
	c := must.Get(n.lab.Client.Dial("udp", to))(t)
	defer c.Close()
	sent := make(chan bool)
	n.loop.Post(func() { <-sent })
	for i := range bpf.MostUnanswered {
		must.OK(t, must.Err(fmt.Fprintf(c, "say %d", i)))
	}
	close(sent)
	_ = c.SetReadDeadline(time.Now().Add(patience))
	b := make([]byte, 1<<10)
	for i := range bpf.MostUnanswered {
		size, err := c.Read(b)
		if want := fmt.Sprintf("b3:8080\nsay %d", i); err != nil || string(b[:size]) != want {
			t.Fatalf("%q, %v; want %q", b[:size], err, want)
		}
	}
}

// A datagram may go to an endpoint after userspace has read the notices, and before it hears
// of that endpoint's refusal. It reaches the next endpoint too.
func TestDatagramJustBeforeARefusalIsSentAgain(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		forDeciders(t, func(t *testing.T, by func(*Options)) {
			lab := netns.NewLab(t, 2)
			server := lab.Backends[1].EchoUDP(t, 8080)
			n := newNode(t, lab, by)
			n.config.MasqueradeAll = hidden
			w := n.server.worker
			refused := func() uint64 { return n.server.Stats().Kernel["refused"] }
			for sessions := 1; ; sessions++ {
				// Nobody has failed yet, as far as this Service's balancer knows.
				vip := fmt.Sprintf("10.96.0.%d", sessions)
				n.apply(named(fmt.Sprint("s", sessions), svc(vip, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080))))
				had, before := len(server.Peers()), refused()
				c := must.Get(lab.Client.Dial("udp", vip+":80"))(t)
				defer c.Close()
				sent := false
				n.onLoop(func() {
					_, _ = c.Write([]byte("first"))
					for !sent && len(server.Peers()) == had { // an upcall, and the refusal, or an answer
						for w.upcalls.AvailableBytes() == 0 && refused() == before && len(server.Peers()) == had {
							runtime.Gosched()
						}
						w.readNotices()
						if refused() > before {
							_, _ = c.Write([]byte("second"))
							sent = true
						}
						w.read(w.upcalls, upcallShare, w.handle)
						w.endRound()
					}
				})
				if !sent {
					continue
				}
				_ = c.SetReadDeadline(time.Now().Add(patience))
				b := make([]byte, 1<<10)
				for _, want := range []string{"b2:8080\nfirst", "b2:8080\nsecond"} {
					if size, err := c.Read(b); err != nil || string(b[:size]) != want {
						t.Fatalf("%q, %v; want %q", b[:size], err, want)
					}
				}
				n.finish()
				for _, r := range n.taken() {
					if r.VIP.Addr().String() == vip && (r.DatagramsFromClient != 2 || r.BytesFromClient != 11 || r.DatagramsFromEndpoint != 2) {
						t.Errorf("hidden %v: %+v", hidden, r)
					}
				}
				return
			}
		})
	}
}

// A datagram may be queued for an endpoint when userspace hears of that endpoint's refusal. The
// next endpoint gets it once.
func TestQueuedDatagramIsSentAgainOnce(t *testing.T) {
	lab := netns.NewLab(t, 2)
	server := lab.Backends[1].WitnessUDP(t, 8080)
	n := newNode(t, lab, func(o *Options) { o.ask = true })
	w := n.server.worker
	count := func(which string) uint64 { return n.server.Stats().Kernel[which] }
	for sessions := uint64(1); count("refused") == 0; sessions++ {
		// Nobody has failed yet, as far as this balancer knows.
		vip := fmt.Sprintf("10.96.0.%d", sessions)
		n.apply(svc(vip, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)))
		c := lab.Client.Connect(t, "udp", vip+":80")
		had := len(server.Peers())
		n.onLoop(func() {
			for range 2 {
				_, _ = c.Write([]byte("hello"))
			}
			for count("asked") < 2*sessions {
				runtime.Gosched()
			}
			w.read(w.upcalls, 1, w.handle)
			w.endRound()
			for count("refused") == 0 && len(server.Peers()) == had {
				runtime.Gosched()
			}
			w.read(w.upcalls, upcallShare, w.handle)
			w.endRound()
		})
		wait.True(t, "datagrams", func() bool { return len(server.Peers()) >= had+2 })
		n.apply(svc(vip, nil))
		wait.True(t, "a record", func() bool { return len(n.taken()) == int(sessions) })
		if r := n.taken()[sessions-1]; r.DatagramsFromClient != 2 || r.BytesFromClient != 10 || len(server.Peers()) != had+2 {
			t.Errorf("the endpoint got %d: %+v", len(server.Peers())-had, r)
		}
	}
}

// A UDP endpoint that has never answered may close its port at any time, also while another
// process takes over. The client's next datagrams go to another one.
func TestClientLeavesAClosedEndpointThatNeverAnswered(t *testing.T) {
	t.Parallel()
	for _, adopted := range []bool{false, true} {
		forDeciders(t, func(t *testing.T, by func(*Options)) {
			lab := netns.NewLab(t, 2)
			lab.Backends[1].EchoUDP(t, 8080)
			silent := must.Get(lab.Backends[0].ListenPacket("udp", ":8080"))(t)
			defer silent.Close()
			root := netns.MountBPF(t)
			start := func(keep bool) *node {
				n := newNode(t, lab, func(o *Options) {
					by(o)
					o.BPFRoot, o.Name, o.Keep = root, "test", keep
				})
				n.forgetsSoon()
				return n
			}
			n := start(adopted)
			n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
			c := must.Get(lab.Client.Dial("udp", vip4+":80"))(t)
			defer c.Close()
			must.OK(t, must.Err(c.Write([]byte("hello"))))
			wait.True(t, "a session without a copy of its datagrams", func() bool { return n.server.Stats().Open == 1 && !n.keepsCopies() })
			both := svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080))
			if adopted {
				n.leave()
				n = start(false)
			}
			n.apply(both)
			_ = silent.Close()
			b := make([]byte, 1<<10)
			wait.For(t, "an answer", patience, func() error {
				_, _ = c.Write([]byte("hello"))
				_ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
				_, err := c.Read(b)
				return err
			})
			n.finish()
			if r := n.taken(); len(r) != 2 || r[0].End != conntrack.EndpointGone || r[1].Endpoint.Addr.Addr() != lab.Backends[1].IPv4 {
				t.Errorf("adopted %v: %+v", adopted, r)
			}
		})
	}
}

// keepsCopies reports whether the process keeps the first datagrams of a session.
func (n *node) keepsCopies() (keeps bool) {
	n.onLoop(func() {
		for _, f := range n.server.worker.flows {
			keeps = keeps || f != nil && f.handshake != nil
		}
	})
	return keeps
}
