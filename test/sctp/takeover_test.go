package sctp

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// takeOver starts a proxy that takes the place of p, and returns it once it serves.
func (p *proxy) takeOver(node *netns.Namespace) *proxy {
	p.t.Helper()
	next := &proxy{t: p.t, dir: p.dir, exited: make(chan error, 1)}
	next.run(node, "--take-over")
	p.t.Cleanup(func() {
		next.kill()
		if p.t.Failed() {
			p.t.Logf("the next sluice said:\n%s", next.said())
		}
	})
	next.await("ready after a take-over", `"message":"ready"`)
	return next
}

// TestPromise7_AssociationsMove: associations go from process to process in the middle of what
// they do: with messages in flight both ways in several streams, with messages that their client
// does not read, and while they wait for an endpoint. Each message arrives once, whole and in its
// stream's order, new associations are accepted all the time, and each association has one record,
// which tells the whole.
func TestPromise7_AssociationsMove(t *testing.T) {
	const pace = 200 * time.Millisecond
	const talkers, slow, size = 90, 9, 3000
	takeOvers := 3
	if full() {
		takeOvers = 20
	}
	lab := netns.NewLab(t, 2)
	busy, flooding := lab.Backends[0], lab.Backends[1]
	serve(t, busy.Namespace, at(busy), options(), echo)
	serve(t, busy.Namespace, netip.AddrPortFrom(busy.IPv6, targetPort).String(), options(), echo)
	var flooded atomic.Int64
	serve(t, flooding.Namespace, at(flooding), options(), func(p *peer) { flood(p, &flooded) })
	held := svc{name: "held", ip: "10.96.0.12", meta: "{sluice.dev/hold: 10m}"}
	services := []svc{
		{name: "four", ip: "10.96.0.10", endpoints: []string{busy.IPv4.String()}},
		{name: "six", ip: "fd00:96::10", endpoints: []string{busy.IPv6.String()}},
		{name: "slow", ip: "10.96.0.11", endpoints: []string{flooding.IPv4.String()}},
	}
	p := startProxy(t, lab.Node.Namespace, manifest(append(services, held)...))
	begin := func(to string, o sys.SCTPOptions) *peer {
		t.Helper()
		a, err := dial(lab.Client.Namespace, to, o)
		must.OKf(t, err, "%s", to)
		return a
	}
	to := func(i int) string { return []string{"10.96.0.10:3868", "[fd00:96::10]:3868"}[i%2] }

	var stop atomic.Bool
	var running sync.WaitGroup
	var sent [talkers]atomic.Int64
	for i := range talkers {
		a := begin(to(i), options())
		running.Go(func() {
			err := exchangeWhile(a, uint64(i), size, func(n int) bool {
				if sent[i].Swap(int64(n)) != int64(n) && n%8 == 0 {
					time.Sleep(pace) // else the guest has no time for anything else
				}
				return !stop.Load()
			})
			check.OKf(t, err, "association %d, after %d messages", i, sent[i].Load())
		})
	}
	var opened atomic.Int64
	running.Go(func() {
		for i := 0; !stop.Load(); i++ {
			a, err := dial(lab.Client.Namespace, to(i), options())
			if err == nil {
				opened.Add(1)
				err = exchangeOver(a, uint64(i), 1)
			}
			if err != nil {
				t.Errorf("new association %d: %v", i, err)
				return
			}
		}
	})
	narrow := options()
	narrow.ReceiveBuffer = 200 << 10
	var readers []*peer
	for range slow {
		readers = append(readers, begin("10.96.0.11:3868", narrow))
	}
	waiting := begin("10.96.0.12:3868", options())
	idle := append(readers, waiting)
	for _, a := range idle {
		t.Cleanup(a.abort)
	}
	must.OK(t, waiting.send(note{text: []byte("early")}))
	p.await("a connection that is held", "connections wait for endpoints")
	wait.For(t, "a flood", patience, func() error {
		if n := flooded.Load(); n < slow*floodMessages*floodSize/2 {
			return fmt.Errorf("%d bytes", n)
		}
		return nil
	})

	// progress waits until each association has moved some more messages.
	progress := func() {
		t.Helper()
		var from [talkers + 1]int64
		at := func(i int) int64 {
			if i == talkers {
				return opened.Load()
			}
			return sent[i].Load()
		}
		for i := range from {
			from[i] = at(i)
		}
		wait.For(t, "all associations go on", patience, func() error {
			for i := range from {
				if n := at(i); n < from[i]+3 && !t.Failed() {
					return fmt.Errorf("association %d has moved %d messages", i, n-from[i])
				}
			}
			return nil
		})
	}
	processes, moves := []*proxy{p}, 0
	for n := range takeOvers {
		progress()
		before := processes[n]
		next := before.takeOver(lab.Node.Namespace)
		processes = append(processes, next)
		if n == 0 {
			held.endpoints = []string{busy.IPv4.String()}
			next.write(manifest(append(services, held)...))
			if got, err := waiting.receive(); err != nil || string(got.text) != "early" {
				t.Fatalf("%q, %v", got.text, err)
			}
		}
		progress()
		if before.awaitGone() {
			moves++
		}
	}
	stop.Store(true)
	running.Wait()
	for i, a := range readers {
		check.OKf(t, drink(a), "slow reader %d", i)
	}
	for _, a := range idle {
		check.OK(t, a.shutDown())
		if _, err := a.receive(); !errors.Is(err, errShutDown) {
			t.Error(err)
		}
	}

	want := map[uint64]int{1: int(opened.Load()) + 1} // by messages of the client
	for i := range sent {
		want[uint64(sent[i].Load())]++
	}
	want[0] += slow
	total := talkers + slow + 1 + int(opened.Load())
	var all []record
	wait.For(t, "all records", patience, func() error {
		for _, p := range processes {
			p.mu.Lock()
			all, p.records = append(all, p.records...), nil
			p.mu.Unlock()
		}
		if len(all) < total {
			return fmt.Errorf("%d of %d", len(all), total)
		}
		return nil
	})
	processes[takeOvers].stop()
	all = append(all, processes[takeOvers].records...)
	check.Equalf(t, len(all), total, "records")
	for _, r := range all {
		want[r.FromClient]--
		answers := r.FromClient
		if r.FromClient == 0 {
			answers = floodMessages
		}
		if r.Protocol != "SCTP" || r.End != "client_shutdown" || r.FromEndpoint != answers || r.StreamsIn != 64 || r.StreamsOut != 64 {
			t.Errorf("%+v", r)
		}
	}
	for messages, n := range want {
		check.Equalf(t, n, 0, "missing records, of %d messages", messages)
	}
	if moves == 0 {
		t.Error("no take-over has moved all associations")
	}
}

// awaitGone waits until a process has ended, because all of its associations are with the next
// one. It returns false if they stay, because that one was too slow to take them, as on a busy
// machine, which the log says.
func (p *proxy) awaitGone() (gone bool) {
	p.t.Helper()
	wait.For(p.t, "the end of the process before", patience, func() error {
		select {
		case err := <-p.exited:
			p.cmd, gone = nil, true
			if err != nil {
				p.t.Errorf("after a take-over: %v", err)
			}
			return nil
		default:
		}
		if strings.Contains(p.said(), "the next sluice takes no more connections") {
			p.t.Log("associations stay with the process before")
			return nil
		}
		return errors.New("it runs")
	})
	return gone
}

// A flood is more than the buffers of the client and of the relay's socket to it take.
const floodMessages, floodSize = 80, 8 << 10

// flood sends numbered messages in several streams, and waits for the client's end.
func flood(p *peer, bytes *atomic.Int64) {
	defer sys.CloseInOrder(p.fd)
	for i := range floodMessages {
		n := note{sys.MessageInfo{PPID: uint32(i), Stream: uint16(i % 8)}, make([]byte, floodSize)}
		if p.send(n) != nil {
			return
		}
		bytes.Add(floodSize)
	}
	for {
		if _, err := p.receive(); err != nil {
			return
		}
	}
}

// drink reads a flood. All of its messages are ordered, and the streams share one path.
func drink(p *peer) error {
	next := make(map[uint16]uint32)
	for i := range uint32(floodMessages) {
		got, err := p.receive()
		if err != nil {
			return fmt.Errorf("after %d messages: %w", i, err)
		}
		if want := next[got.Stream]*8 + uint32(got.Stream); got.PPID != want || len(got.text) != floodSize {
			return fmt.Errorf("message %d of stream %d has %d bytes, want %d", got.PPID, got.Stream, len(got.text), want)
		}
		next[got.Stream]++
	}
	if _, err := p.receiveIn(0); !errors.Is(err, os.ErrDeadlineExceeded) {
		return fmt.Errorf("after the last message: %w", err)
	}
	return nil
}
