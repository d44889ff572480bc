package sctp

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// at is the listening address of an endpoint on a backend.
func at(h *netns.Host) string { return netip.AddrPortFrom(h.IPv4, targetPort).String() }

// Messages pass whole with their information, over both families; each association
// leaves one record whose counts add up (promises 3 and 5).
func TestPromise3And5_MessagesArriveWholeAndRecordsAddUp(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serve(t, b.Namespace, at(b), options(), echo)
	serve(t, b.Namespace, netip.AddrPortFrom(b.IPv6, targetPort).String(), options(), echo)
	p := startProxy(t, lab.Node.Namespace, manifest(
		svc{name: "four", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}},
		svc{name: "six", ip: "fd00:96::10", endpoints: []string{b.IPv6.String()}},
	))
	associations, messages := 40, 20
	if full() {
		associations, messages = 1000, 100
	}
	var all sync.WaitGroup
	room := make(chan struct{}, 20)
	for i := range associations {
		room <- struct{}{}
		all.Go(func() {
			defer func() { <-room }()
			to := "10.96.0.10:3868"
			if i%2 == 1 {
				to = "[fd00:96::10]:3868"
			}
			a, err := dial(lab.Client.Namespace, to, options())
			if err == nil {
				err = exchangeOver(a, uint64(i), messages)
			}
			check.OKf(t, err, "association %d", i)
		})
	}
	all.Wait()
	var up, down uint64
	for _, r := range p.ended(associations) {
		if r.Protocol != "SCTP" || r.End != "client_shutdown" || r.FromClient != uint64(messages) || r.FromEndpoint != uint64(messages) ||
			r.Attempts != 1 || r.StreamsIn != 64 || r.StreamsOut != 64 || r.Source != "node" || r.FirstByte == 0 {
			t.Errorf("%+v", r)
		}
		up, down = up+r.BytesUp, down+r.BytesDown
	}
	if up != down || up == 0 {
		t.Errorf("%d bytes up, %d down", up, down)
	}
}

// Endpoints that are dead, abort or are silent cost a moment, never the association
// (promise 1).
func TestPromise1_DeadEndpointsCostAMomentNeverTheAssociation(t *testing.T) {
	lab := netns.NewLab(t, 4)
	live, closed, silent, aborting := lab.Backends[0], lab.Backends[1], lab.Backends[2], lab.Backends[3]
	serve(t, live.Namespace, at(live), options(), echo)
	_ = closed
	o := options()
	o.Filter = []sys.FilterOp{{Code: sys.FilterReturn}}
	serve(t, silent.Namespace, at(silent), o, echo)
	full := options()
	full.Backlog = 1
	refuse := serve(t, aborting.Namespace, at(aborting), full, echo)
	sys.RefuseSCTP(refuse.fd)
	p := startProxy(t, lab.Node.Namespace, manifest(svc{name: "web", ip: "10.96.0.10",
		endpoints: []string{live.IPv4.String(), closed.IPv4.String(), silent.IPv4.String(), aborting.IPv4.String()}}), "--dial-timeouts", "2s,4s,8s") // the live one may need a second
	const associations = 200
	room := make(chan struct{}, 10)
	var all sync.WaitGroup
	for i := range associations {
		room <- struct{}{}
		all.Go(func() {
			defer func() { <-room }()
			a, err := dial(lab.Client.Namespace, "10.96.0.10:3868", options())
			if err != nil {
				t.Errorf("association %d: %v", i, err)
				return
			}
			defer a.abort()
			check.OKf(t, a.send(note{text: []byte("hello")}), "association %d", i)
			check.OKf(t, must.Err(a.receive()), "association %d", i)
		})
	}
	all.Wait()
	retried := 0
	for _, r := range p.ended(associations) {
		if r.Attempts > 1 {
			retried++
		}
		if r.End != "client_abort" || r.Endpoint != at(live) {
			t.Errorf("%+v", r)
		}
	}
	if retried == 0 {
		t.Error("no association met a dead endpoint")
	}
}

// A port without endpoints aborts at once; when it has some, it is served at once, and
// the other way round. Associations of a removed Service go on (promise 4, A8.7).
func TestPromise4_NoEndpointsRefuse(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serve(t, b.Namespace, at(b), options(), echo)
	with := svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}}
	without := svc{name: "web", ip: "10.96.0.10"}
	other := svc{name: "other", ip: "10.96.0.11", endpoints: []string{b.IPv4.String()}}
	p := startProxy(t, lab.Node.Namespace, manifest(without, other))
	refused := func() error {
		a, err := dial(lab.Client.Namespace, "10.96.0.10:3868", options())
		if err == nil {
			a.abort()
		}
		if !errors.Is(err, sys.ECONNREFUSED) {
			return fmt.Errorf("want a refusal: %w", err)
		}
		return nil
	}
	check.OK(t, refused())
	var kept *peer
	for range 3 {
		p.write(manifest(with, other))
		wait.For(t, "served", patience, func() error {
			a, err := dial(lab.Client.Namespace, "10.96.0.10:3868", options())
			if err == nil {
				if kept != nil {
					kept.abort()
				}
				kept = a
			}
			return err
		})
		talk(t, kept, "hello")
		p.write(manifest(without, other))
		wait.For(t, "refused at once", patience, func() error {
			began := time.Now()
			err := refused()
			if took := time.Since(began); err == nil && took > 2*time.Second {
				return fmt.Errorf("it took %v", took)
			}
			return err
		})
		talk(t, kept, "still there")
	}
	p.write(manifest(other))
	wait.For(t, "the Service is gone", patience, func() error {
		a, err := dialIn(lab.Client.Namespace, "10.96.0.10:3868", netip.Addr{}, 300*time.Millisecond)
		if err == nil {
			a.abort()
			return errors.New("it is served")
		}
		return nil
	})
	talk(t, kept, "without a Service")
	check.OK(t, kept.shutDown())
	if _, err := kept.receive(); !errors.Is(err, errShutDown) {
		t.Error(err)
	}
}

// Each end keeps its kind through the proxy, and in its record.
func TestEndsThroughTheProxy(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	accepted := make(chan *peer, 1)
	few := options()
	few.InStreams = 5
	serve(t, b.Namespace, at(b), few, func(p *peer) { accepted <- p })
	p := startProxy(t, lab.Node.Namespace, manifest(svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}}))
	for _, c := range []struct {
		name string
		side int
		end  func(*peer)
		sees error
		want string
	}{
		{"client's shutdown", 0, func(p *peer) { _ = p.shutDown() }, io.EOF, "client_shutdown"},
		{"endpoint's shutdown", 1, func(p *peer) { _ = p.shutDown() }, io.EOF, "endpoint_shutdown"},
		{"client's abort", 0, func(p *peer) { _ = p.settled(); p.abort() }, sys.ECONNRESET, "client_abort"},
		{"endpoint's abort", 1, func(p *peer) { _ = p.settled(); p.abort() }, sys.ECONNRESET, "endpoint_abort"},
		{"too large", 0, func(p *peer) { _ = p.send(note{text: make([]byte, 64<<10+1)}) }, sys.ECONNRESET, "message_too_large"},
		{"no stream", 0, func(p *peer) { _ = p.send(note{sys.MessageInfo{Stream: 5}, []byte("x")}) }, sys.ECONNRESET, "no_stream"},
	} {
		a := must.Get(dial(lab.Client.Namespace, "10.96.0.10:3868", options()))(t)
		ends := []*peer{a, <-accepted}
		for range 10 {
			must.OK(t, ends[c.side].send(note{text: make([]byte, 1000)}))
		}
		c.end(ends[c.side])
		for read := 0; ; read++ {
			_, err := ends[1-c.side].receive()
			if err == nil {
				continue
			}
			if !errors.Is(err, c.sees) || read != 10 {
				t.Errorf("%s: after %d messages %v, want %v", c.name, read, err, c.sees)
			}
			break
		}
		for _, r := range p.ended(1) {
			if r.End != c.want || r.FromClient+r.FromEndpoint != 10 || r.BytesUp+r.BytesDown != 10_000 {
				t.Errorf("%s: %+v", c.name, r)
			}
		}
		ends[1-c.side].abort()
		switch c.want {
		case "message_too_large", "no_stream": // the offender gets the ABORT, too
			check.ErrorIsf(t, must.Err(ends[c.side].receive()), c.sees, "%s: the sender saw", c.name)
			fallthrough
		case "client_shutdown", "endpoint_shutdown":
			ends[c.side].abort()
		}
	}
}

// A stopped proxy ends associations with a record; a killed one is taken over, and its
// clients get an ABORT at once (promise 6).
func TestPromise6_StopAndTakeOver(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serve(t, b.Namespace, at(b), options(), echo)
	lab.Settle(t)
	before := lab.Node.Dump(t)
	p := startProxy(t, lab.Node.Namespace, manifest(svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}}))
	open := func() *peer {
		a := must.Get(dial(lab.Client.Namespace, "10.96.0.10:3868", options()))(t)
		talk(t, a, "hello")
		return a
	}
	a := open()
	p.kill()
	check.ErrorIsf(t, must.Err(a.receive()), sys.ECONNRESET, "the killed proxy's client saw")
	p.mu.Lock()
	p.log.Reset()
	p.records = nil
	p.mu.Unlock()
	p.run(lab.Node.Namespace)
	p.await("ready again", `"message":"ready"`)
	a = open()
	p.stop()
	check.ErrorIsf(t, must.Err(a.receive()), sys.ECONNRESET, "the stopped proxy's client saw")
	if r := p.ended(1); r[0].End != "shutdown" || r[0].FromClient != 1 {
		t.Errorf("%+v", r)
	}
	check.Textf(t, lab.Node.Dump(t), before, "left behind")
}

// dialIn is dialFrom with a bound.
func dialIn(from *netns.Namespace, to string, local netip.Addr, d time.Duration) (*peer, error) {
	type result struct {
		p   *peer
		err error
	}
	done := make(chan result, 1)
	go func() {
		p, err := dialFrom(from, to, local, options())
		done <- result{p, err}
	}()
	select {
	case r := <-done:
		return r.p, r.err
	case <-time.After(d):
		go func() {
			if r := <-done; r.err == nil {
				r.p.abort()
			}
		}()
		return nil, sys.ETIMEDOUT
	}
}
