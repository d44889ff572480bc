package flow

import (
	"cmp"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// An endpoint may refuse a flow of the table between the moment at which userspace reads
// the notices and that at which it reads the upcalls. The first packet is in a notice:
// userspace must have it when it hears of the refusal, or the client has to send again.
func TestRefusalOvertakesNoNotice(t *testing.T) {
	t.Run("TCP", func(t *testing.T) {
		refusalOvertakes(t, (*netns.Host).EchoTCP, func(client *netns.Host) error {
			return must.Err(client.Ask("tcp", vip4+":80"))
		})
	})
	t.Run("UDP", func(t *testing.T) {
		refusalOvertakes(t, (*netns.Host).EchoUDP, func(client *netns.Host) error {
			c, err := client.Dial("udp", vip4+":80")
			if err != nil {
				return err
			}
			defer c.Close()
			return must.Err(question(c))
		})
	})
}

func refusalOvertakes(t *testing.T, serve func(*netns.Host, testing.TB, uint16) *netns.Echo, ask func(client *netns.Host) error) {
	lab := netns.NewLab(t, 2)
	serve(lab.Backends[1], t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)))
	w := n.server.worker
	for refused := false; !refused; {
		var answered atomic.Bool
		asked, round := make(chan error, 1), make(chan bool, 1)
		n.loop.Post(func() {
			w.readNotices()
			go func() {
				err := ask(lab.Client)
				answered.Store(true)
				asked <- err
			}()
			said := false
			for !said && !answered.Load() {
				runtime.Gosched()
				said = w.upcalls.AvailableBytes() > 0
			}
			w.read(w.upcalls, upcallShare, w.handle)
			w.endRound()
			round <- said
		})
		refused = <-round
		must.OK(t, <-asked)
	}
	n.finish()
	for _, r := range n.taken() {
		if r.End == conntrack.ConnectFailed || r.Attempts > 1 && r.Endpoint.Addr.Addr() != lab.Backends[1].IPv4 {
			t.Errorf("%+v", r)
		}
	}
}

// wantHidden expects that a server saw no client's own address.
func wantHidden(t *testing.T, lab *netns.Lab, s *netns.Echo) {
	t.Helper()
	for _, p := range s.Peers() {
		if p.Addr() == lab.Client.IPv4 {
			t.Fatalf("%s saw %s", s.Name, p)
		}
	}
}

// The endpoint sees the address of no hidden client, also while the client
// sends and its session ends because the endpoint is gone.
func TestEndOfSessionHidesTheClient(t *testing.T) {
	t.Parallel()
	const changes, senders = 120, 2
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		var servers []*netns.Echo
		var endpoints []netip.AddrPort
		for _, b := range lab.Backends {
			servers = append(servers, b.WitnessUDP(t, 8080))
			endpoints = append(endpoints, at(b.IPv4, 8080))
		}
		n := newNode(t, lab, func(o *Options) {
			by(o)
			o.Shortcuts = false // its packets pass both hooks
		})
		n.config.MasqueradeAll = true
		n.apply(svc(vip4, nil, endpoints[0]))
		var over atomic.Bool
		var sending sync.WaitGroup
		// A session stays with the relay if more of its datagrams come than may be undecided,
		// while the worker's thread does not run. So more may be, and each sender begins another
		// session in time.
		const patient = 100
		n.server.kernel.Control.MostUndecided = 1 << 16
		session := func() {
			c, err := lab.Client.Dial("udp", vip4+":80")
			if err != nil {
				t.Error(err)
				over.Store(true)
				return
			}
			defer c.Close()
			answer := make([]byte, 1<<10)
			for silent := 0; silent < patient && !over.Load(); silent++ {
				_, _ = c.Write([]byte("hello"))
				_ = c.SetReadDeadline(time.Now().Add(time.Millisecond))
				if _, err := c.Read(answer); err == nil {
					silent = 0
				}
			}
		}
		for range senders {
			sending.Go(func() {
				for !over.Load() {
					session()
				}
			})
		}
		for i := range changes {
			had := len(servers[i%2].Peers())
			wait.True(t, "a datagram", func() bool { return len(servers[i%2].Peers()) > had })
			n.apply(svc(vip4, nil, endpoints[(i+1)%2]))
		}
		over.Store(true)
		sending.Wait()
		for _, s := range servers {
			wantHidden(t, lab, s)
		}
	})
}

// The same if an endpoint refuses each of several datagrams: it is given up once, and the client's
// next datagrams follow the first one to the next endpoint.
func TestRefusalHidesTheClient(t *testing.T) {
	t.Parallel()
	const rounds, datagrams = 100, 50
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		server := lab.Backends[1].WitnessUDP(t, 8080)
		n := newNode(t, lab, by)
		n.config.MasqueradeAll = true
		for i := range uint16(rounds) {
			n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 9000+i), at(lab.Backends[1].IPv4, 8080)))
			for range 2 {
				c := must.Get(lab.Client.Dial("udp", vip4+":80"))(t)
				defer c.Close()
				for range datagrams {
					_, _ = c.Write([]byte("hello"))
				}
				_ = c.SetReadDeadline(time.Now().Add(patience))
				must.OKf(t, must.Err(c.Read(make([]byte, 1<<10))), "round %d", i)
			}
		}
		wantHidden(t, lab, server)
		n.finish()
		for _, r := range n.taken() {
			if r.End == conntrack.ConnectFailed || len(r.Failed) > 1 || r.Endpoint.Addr.Addr() != lab.Backends[1].IPv4 {
				t.Errorf("%+v", r)
			}
		}
	})
}

// The same for a datagram that comes just while its session moves to the next endpoint.
func TestMoveHidesTheClient(t *testing.T) {
	lab := netns.NewLab(t, 2)
	server := lab.Backends[1].WitnessUDP(t, 8080)
	refusing, serving := at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)
	var c atomic.Pointer[net.Conn]
	var n *node
	var last netip.Addr // the endpoint that was tried last
	moved := make(chan error, 1)
	n = newNode(t, lab, func(o *Options) {
		o.ask = true
		o.SameLink = func(_, endpoint netip.Addr) bool { // true: the node's address hides the client's
			if last == refusing.Addr() && endpoint == serving.Addr() {
				_, err := (*c.Load()).Write([]byte("during the move"))
				moved <- cmp.Or(err, wait.Poll(patience, func() error {
					if n.server.worker.upcalls.AvailableBytes() == 0 && len(server.Peers()) == 0 {
						return errors.New("no datagram came up, and the endpoint got none")
					}
					return nil
				}))
			}
			last = endpoint
			return true
		}
	})
	n.apply(svc(vip4, nil, refusing, serving))
	for len(moved) == 0 {
		client := lab.Client.Connect(t, "udp", vip4+":80")
		c.Store(&client)
		must.OK(t, must.Err(question(client)))
	}
	must.OK(t, <-moved)
	wantHidden(t, lab, server)
}

// After a session that hid its client, nothing hides the client from an endpoint that may see it
// now, even if another program removes our sign (tc_index) from the packets.
func TestEndedSessionHidesNobody(t *testing.T) {
	lab := netns.NewLab(t, 2)
	server := lab.Backends[0].WitnessUDP(t, 8080)
	lab.Backends[1].WitnessUDP(t, 8080)
	n := newNode(t, lab, nil)
	attachAtEgress(t, lab.Node, "b1", link.Head(), asm.Instructions{
		asm.StoreImm(asm.R1, tcIndex, 0, asm.Word),
		asm.Mov.Imm(asm.R0, -1), // go on
		asm.Return(),
	})
	c := lab.Client.Connect(t, "udp", vip4+":80")
	for i, b := range []int{0, 1, 0} {
		n.config.MasqueradeAll = i == 0
		n.apply(svc(vip4, nil, at(lab.Backends[b].IPv4, 8080)))
		must.OK(t, must.Err(question(c)))
	}
	own := netip.MustParseAddrPort(c.LocalAddr().String())
	if saw := server.Peers(); len(saw) != 2 || saw[0] == own || saw[1] != own {
		t.Errorf("%s saw %v, want an address of the node, then %s", server.Name, saw, own)
	}
}
