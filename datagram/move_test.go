package datagram

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// next has another server take the node's place, and returns the one before, whose sessions are
// to move.
func (n *node) next() *Server {
	n.t.Helper()
	before, table := n.server, n.table
	n.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := errors.Join(before.Stop(ctx), table.Close(ctx)); err != nil {
			n.t.Error(err)
		}
	})
	o := before.options
	o.Table = conntrack.NewTable(conntrack.Options{Shards: loops, Sink: &n.records})
	for i, loop := range n.loops {
		shard := o.Table.Shard(i)
		shard.OnPending(func() { loop.Post(shard.Flush) })
	}
	n.table, n.server = o.Table, New(o)
	before.Pause()
	return before
}

// give gives sessions to a server, as another process would.
func give(t *testing.T, to *Server) func([]handover.Moved) ([]bool, error) {
	return func(list []handover.Moved) ([]bool, error) {
		taken := make([]bool, len(list))
		for i, m := range list {
			fd, err := unix.Dup(m.FDs[0])
			if err != nil {
				t.Error(err)
				continue
			}
			m.FDs = []int{fd}
			if a := to.Take(&m); a != nil {
				a.Begin()
				taken[i] = true
			} else {
				_ = unix.Close(fd)
			}
		}
		return taken, nil
	}
}

// TestHeldAddressStays: a session whose client's address the process before holds stays there, if
// this one holds no addresses.
func TestHeldAddressStays(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, func(o *Options) { o.Loops = o.Loops[:1] })
	lab.Backends[0].WitnessUDP(t, 5300)
	service := svc("echo", vip4, nil, at(lab.Backends[0].IPv4, 5300))
	n.apply(service)
	must.OK(t, must.Err(ask(client(t, lab.Client, vip4+":53"), "q", patience)))
	before := n.next()
	n.apply(service)
	moved, err := before.Move(func(list []handover.Moved) ([]bool, error) {
		for i := range list {
			var m movedSession
			check.OK(t, json.Unmarshal(list[i].State, &m))
			m.Socket.Held = true
			list[i].State, _ = json.Marshal(m)
		}
		return give(t, n.server)(list)
	})
	if moved != 0 || err != nil || before.Stats().Sessions.Load() != 1 {
		t.Errorf("%d sessions have moved, %v; %d stay", moved, err, before.Stats().Sessions.Load())
	}
	before.Leave()
}

// TestSessionsMove: a session keeps its socket to the endpoint, answered or not. One whose endpoint
// serves no more ends. Each has one record.
func TestSessionsMove(t *testing.T) {
	lab := netns.NewLab(t, 2)
	n := newNode(t, lab, func(o *Options) { o.Loops = o.Loops[:1] }) // the other server has other sockets
	witness := lab.Backends[0].WitnessUDP(t, 5300)
	other := "10.96.0.54"
	n.apply(svc("echo", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	n.apply(svc("silent", other, nil, at(lab.Backends[0].IPv4, 5301)))
	silent := must.Get(lab.Backends[0].ListenPacket("udp4", ":5301"))(t)
	defer silent.Close()
	_ = silent.SetReadDeadline(time.Now().Add(patience))
	answered, unanswered := client(t, lab.Client, vip4+":53"), client(t, lab.Client, other+":53")
	who := must.Get(ask(answered, "q", patience))(t)
	must.OK(t, must.Err(unanswered.Write([]byte("one"))))
	if _, _, err := silent.ReadFrom(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}

	before := n.next()
	n.apply(svc("echo", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	n.apply(svc("silent", other, nil, at(lab.Backends[0].IPv4, 5301)))
	must.Equalf(t, must.Get(before.Move(give(t, n.server)))(t), 2, "sessions have moved")
	before.Leave()
	check.Equalf(t, before.Stats().Sessions.Load(), 0, "sessions stay")
	if again, err := ask(answered, "q", patience); again != who || err != nil {
		t.Errorf("%q, %v, want %q: the same endpoint sees the same address", again, err, who)
	}
	check.Equalf(t, len(witness.Peers()), 2, "the endpoint has got datagrams")

	before = n.next()
	n.apply(svc("echo", vip4, nil, at(lab.Backends[1].IPv4, 5309))) // the answered one's is gone
	n.apply(svc("silent", other, nil, at(lab.Backends[0].IPv4, 5301)))
	check.Equalf(t, must.Get(before.Move(give(t, n.server)))(t), 2, "sessions have moved")
	before.Leave()
	wait.For(t, "the session whose endpoint is gone has its record", patience, func() error {
		if ends := n.records.Ends(); len(ends) != 1 || ends[conntrack.EndpointGone] != 1 {
			return fmt.Errorf("%v", ends)
		}
		return nil
	})
}

// TestCopiesMove: what a session keeps for another endpoint moves with it.
func TestCopiesMove(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	silent := must.Get(lab.Backends[0].ListenPacket("udp4", ":5300"))(t)
	defer silent.Close()
	_ = silent.SetReadDeadline(time.Now().Add(patience))
	apply := func() { n.apply(svc("silent", vip4, nil, at(lab.Backends[0].IPv4, 5300))) }
	apply()
	must.OK(t, must.Err(client(t, lab.Client, vip4+":53").Write([]byte("q"))))
	if _, _, err := silent.ReadFrom(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	before := n.next()
	apply()
	want := []string{"one", "", "three"}
	for _, w := range before.workers {
		var list []*session
		var messages []handover.Moved
		w.run(func() { // at once, before copies expire
			for _, c := range w.sessions {
				w.unacked.drop(c)
				for _, p := range want {
					w.unacked.keepOne(c, []byte(p))
				}
			}
			list, messages = w.detach()
		})
		for i, m := range messages {
			fd := must.Get(unix.Dup(m.FDs[0]))(t)
			m.FDs = []int{fd}
			a, is := n.server.Take(&m).(*arrived)
			if !is {
				t.Fatal("the session is not taken")
			}
			to := a.listener.worker
			var got []string
			to.run(func() {
				a.begin()
				for _, c := range to.sessions {
					for i := range c.unacked.count() {
						got = append(got, string(c.unacked.datagram(i)))
					}
				}
			})
			check.EqualSlicesf(t, got, want, "copies that have arrived")
			w.run(func() { list[i].settle(true) })
		}
	}
	check.Equalf(t, n.server.Stats().Sessions.Load(), 1, "sessions have moved")
	before.Leave()
}

// TestSessionsStay: what another process does not confirm goes on here, with its socket.
func TestSessionsStay(t *testing.T) {
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, nil)
	lab.Backends[0].WitnessUDP(t, 5300)
	n.apply(svc("echo", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	const clients = 5
	var list [clients]net.Conn
	var saw [clients]string
	for i := range list {
		var err error
		list[i] = client(t, lab.Client, vip4+":53")
		if saw[i], err = ask(list[i], "q", patience); err != nil {
			t.Fatal(err)
		}
	}
	var ended netip.AddrPort
	n.server.Pause()
	moved, err := n.server.Move(func(m []handover.Moved) ([]bool, error) {
		if len(m) == 0 {
			t.Error("nothing is given")
		}
		if !ended.IsValid() { // a session that somebody closes meanwhile
			for _, w := range n.server.workers {
				w.run(func() {
					w.shard.Each(func(r *conntrack.Record) {
						if !ended.IsValid() {
							ended = r.Client
							r.Owner.(*session).EndConnection(conntrack.EndpointGone)
						}
					})
				})
			}
		}
		return make([]bool, len(m)), errors.New("broken")
	})
	if moved != 0 || err == nil {
		t.Errorf("%d sessions have moved, %v", moved, err)
	}
	n.server.Resume()
	for i, c := range list {
		again, err := ask(c, "q", patience)
		is := netip.MustParseAddrPort(c.LocalAddr().String()) == ended
		if err != nil || (again == saw[i]) == is {
			t.Errorf("client %d: the endpoint saw %q, then %q, %v; ended %v", i, saw[i], again, err, is)
		}
	}
}
