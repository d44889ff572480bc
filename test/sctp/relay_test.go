package sctp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/message"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// rig is the relay alone, between a listener and one endpoint.
type rig struct {
	addr netip.AddrPort
	ends chan message.End
	did  func() message.Stats
	out  chan int // the relay's sockets to the endpoint
}

type owner struct {
	link message.Link
	ends chan message.End
}

func (o *owner) LinkEnded(end message.End) { o.ends <- end }

func newRig(t *testing.T, c message.Config, o sys.SCTPOptions, endpoint netip.AddrPort) *rig {
	t.Helper()
	loop := must.Get(poll.New())(t)
	w := message.New(c).NewWorker(loop)
	done := make(chan error, 1)
	go func() { done <- loop.Run() }()
	t.Cleanup(func() {
		loop.Stop()
		check.OK(t, <-done)
	})
	r := &rig{ends: make(chan message.End, 1000), did: w.Stats, out: make(chan int, 1000)}
	s := serve(t, nil, "127.0.0.1:0", o, func(c *peer) {
		e, err := dial(nil, endpoint.String(), o)
		if err != nil {
			t.Errorf("to the endpoint: %v", err)
			return
		}
		sc, _ := sys.SCTPStatusOf(c.fd)
		se, _ := sys.SCTPStatusOf(e.fd)
		r.out <- e.fd
		loop.Post(func() {
			w.Start(&(&owner{}).link, message.Socket{FD: c.fd, Streams: sc.Out}, message.Socket{FD: e.fd, Streams: se.Out}, &owner{ends: r.ends})
		})
	})
	r.addr = s.addr
	return r
}

// proxied are the options of the proxy's sockets for a largest message.
func proxied(largest int) sys.SCTPOptions {
	return sys.SCTPOptions{OutStreams: 64, InStreams: 64, SendBuffer: largest, ReceiveBuffer: 3 * largest}
}

func config(largest int) message.Config {
	return message.Config{MaxMessage: largest, MaxHeld: 64 << 20, DrainTimeout: 2 * time.Second}
}

func (r *rig) end(t *testing.T, want message.End) {
	t.Helper()
	select {
	case got := <-r.ends:
		check.Equalf(t, got, want, "the link ended by")
	case <-time.After(patience):
		t.Errorf("the link did not end, want %v", want)
	}
}

// Each end keeps its kind, in both directions, after what was sent before it.
func TestRelayKeepsEnds(t *testing.T) {
	for _, c := range []struct {
		name string
		end  func(*peer)
		sees error
		want [2]message.End // client ends, endpoint ends
	}{
		{"shutdown", func(p *peer) { _ = p.shutDown() }, io.EOF, [2]message.End{message.ClientShutdown, message.EndpointShutdown}},
		{"close", func(p *peer) { sys.CloseInOrder(p.fd) }, io.EOF, [2]message.End{message.ClientShutdown, message.EndpointShutdown}},
		{"abort", func(p *peer) { _ = p.settled(); p.abort() }, sys.ECONNRESET, [2]message.End{message.ClientAbort, message.EndpointAbort}},
	} {
		for side, name := range []string{"client", "endpoint"} {
			t.Run(name+" "+c.name, func(t *testing.T) {
				accepted := make(chan *peer, 1)
				s := serve(t, nil, "127.0.0.1:0", options(), func(p *peer) { accepted <- p })
				r := newRig(t, config(64<<10), proxied(64<<10), s.addr)
				p := must.Get(dial(nil, r.addr.String(), options()))(t)
				a, b := p, <-accepted
				if side == 1 {
					a, b = b, a
				}
				const messages = 40
				var sent []note
				for i := range messages {
					n := note{sys.MessageInfo{Stream: uint16(i % 5), PPID: uint32(i)}, bytes.Repeat([]byte{byte(i)}, 1+rand.IntN(3000))}
					sent = append(sent, n)
					must.OK(t, a.send(n))
				}
				c.end(a)
				for i := 0; ; i++ {
					got, err := b.receive()
					if err != nil {
						if !errors.Is(err, c.sees) || i != messages {
							t.Errorf("after %d messages: %v, want %v", i, err, c.sees)
						}
						break
					}
					if want := sent[got.PPID]; got.MessageInfo != want.MessageInfo || !bytes.Equal(got.text, want.text) {
						t.Errorf("message %d: %+v of %d bytes, want %+v of %d", i, got.MessageInfo, len(got.text), want.MessageInfo, len(want.text))
					}
				}
				sys.Close(b.fd)
				r.end(t, c.want[side])
				if c.name == "shutdown" {
					check.ErrorIsf(t, must.Err(a.receive()), errShutDown, "who began the shutdown saw")
				}
			})
		}
	}
}

// A side that aborts while the other one sends ends the link at once, with its own end:
// also if the error shows when a message is sent to it, or while one waits for room.
func TestRelayEndsWhileMessagesPass(t *testing.T) {
	for side, want := range []message.End{message.ClientAbort, message.EndpointAbort} {
		for _, reads := range []int{0, 100} {
			t.Run(fmt.Sprint(want, " after ", reads), func(t *testing.T) {
				accepted := make(chan *peer, 1)
				s := serve(t, nil, "127.0.0.1:0", options(), func(p *peer) { accepted <- p })
				r := newRig(t, config(64<<10), proxied(64<<10), s.addr)
				for range 3 {
					p := must.Get(dial(nil, r.addr.String(), options()))(t)
					aborts, sends := p, <-accepted
					if side == 1 {
						aborts, sends = sends, aborts
					}
					text := make([]byte, 2000)
					for reads == 0 && (sends.box.Send(sends.fd, text, sys.MessageInfo{}) != sys.EAGAIN || sends.poll(unix.POLLOUT, 100*time.Millisecond)) {
					}
					sent := make(chan error, 1)
					go func() {
						for {
							if err := sends.send(note{text: text}); err != nil {
								sent <- err
								return
							}
						}
					}()
					for range reads {
						must.OK(t, must.Err(aborts.receive()))
					}
					aborts.abort()
					r.end(t, want)
					if err := <-sent; !errors.Is(err, sys.ECONNRESET) && !errors.Is(err, sys.EPIPE) {
						t.Errorf("the sender saw %v", err)
					}
					sends.abort()
				}
			})
		}
	}
}

// Large messages pass whole up to the bound; beyond it the association is aborted.
func TestRelayBoundsMessages(t *testing.T) {
	const bound = 900 << 10
	s := serve(t, nil, "127.0.0.1:0", options(), echo)
	r := newRig(t, config(bound), proxied(bound), s.addr)
	for _, c := range []struct {
		size int
		ok   bool
	}{{1, true}, {64 << 10, true}, {64<<10 + 1, true}, {bound, true}, {bound + 1, false}} {
		p := must.Get(dial(nil, r.addr.String(), options()))(t)
		want := note{sys.MessageInfo{Stream: 3, PPID: 9}, bytes.Repeat([]byte("0123456789abcdef"), c.size/16+1)[:c.size]}
		for round := range 3 {
			must.OK(t, p.send(want))
			got, err := p.receive()
			if !c.ok {
				check.ErrorIsf(t, err, sys.ECONNRESET, "%d bytes", c.size)
				r.end(t, message.TooLarge)
				break
			}
			if err != nil || got.MessageInfo != want.MessageInfo || !bytes.Equal(got.text, want.text) {
				t.Fatalf("round %d: %d bytes came back as %d, %v", round, c.size, len(got.text), err)
			}
		}
		if c.ok {
			_ = p.shutDown()
			r.end(t, message.ClientShutdown)
		}
		p.abort()
	}
}

// A message on a stream that the endpoint does not grant ends the association.
func TestRelayNamesMissingStreams(t *testing.T) {
	few := options()
	few.InStreams = 2
	s := serve(t, nil, "127.0.0.1:0", few, echo)
	r := newRig(t, config(64<<10), proxied(64<<10), s.addr)
	p := must.Get(dial(nil, r.addr.String(), options()))(t)
	for _, stream := range []uint16{0, 1} {
		must.OK(t, p.send(note{sys.MessageInfo{Stream: stream}, []byte("x")}))
		must.OK(t, must.Err(p.receive()))
	}
	_ = p.send(note{sys.MessageInfo{Stream: 2}, []byte("x")})
	if _, err := p.receive(); !errors.Is(err, sys.ECONNRESET) {
		t.Errorf("got %v", err)
	}
	r.end(t, message.NoStream)
}

// A slow reader stops the sender, and loses nothing; the memory for others' messages is
// bounded.
func TestRelayPassesBackpressureOn(t *testing.T) {
	for _, held := range []int64{64 << 20, 0} { // with 0, nothing may be held
		release := make(chan struct{})
		got := make(chan int, 1)
		s := serve(t, nil, "127.0.0.1:0", sys.SCTPOptions{}, func(p *peer) {
			<-release
			n := 0
			for {
				m, err := p.receive()
				if err != nil {
					got <- n
					return
				}
				check.Equalf(t, int(m.PPID), n, "message %d came in the place of %d", m.PPID, n)
				n++
			}
		})
		c := config(64 << 10)
		c.MaxHeld = held
		r := newRig(t, c, proxied(64<<10), s.addr)
		p := must.Get(dial(nil, r.addr.String(), sys.SCTPOptions{}))(t)
		sent := 0
		for ; ; sent++ {
			e := p.box.Send(p.fd, make([]byte, 10_000), sys.MessageInfo{PPID: uint32(sent)})
			if e == sys.EAGAIN {
				if !p.poll(unix.POLLOUT, 300*time.Millisecond) {
					break
				}
				sent--
			} else if e != 0 {
				t.Fatal(e)
			}
		}
		t.Logf("%d messages until the sender stopped", sent)
		close(release)
		must.OK(t, p.shutDown())
		check.Equalf(t, <-got, sent, "messages arrived")
		r.end(t, message.ClientShutdown)
	}
}

// A link whose message the kernel has no memory for does not spin, though its send buffer
// has room and epoll says so, and goes on once there is memory.
func TestRelayWaitsForMemory(t *testing.T) {
	const limits = "/proc/sys/net/sctp/sctp_mem" // of all associations, in pages
	usual := must.Read(t, limits)
	set := func(text []byte) {
		must.OK(t, os.WriteFile(limits, text, 0))
	}
	defer set(usual)

	release, got := make(chan struct{}), make(chan int, 1)
	s := serve(t, nil, "127.0.0.1:0", options(), func(p *peer) {
		<-release
		for n := 0; ; n++ {
			m, err := p.receive()
			if err != nil {
				got <- n
				return
			}
			check.Equalf(t, int(m.PPID), n, "message %d came in the place of %d", m.PPID, n)
		}
	})
	r := newRig(t, config(64<<10), proxied(8<<20), s.addr)
	p := must.Get(dial(nil, r.addr.String(), options()))(t)
	sent := 0
	send := func(size int) {
		t.Helper()
		must.OK(t, p.send(note{sys.MessageInfo{PPID: uint32(sent)}, make([]byte, size)}))
		sent++
	}
	await := func(what string, done func(message.Stats) bool) {
		t.Helper()
		must.OK(t, wait.Poll(patience, func() error {
			if did := r.did(); !done(did) {
				return fmt.Errorf("%s: not yet: %+v", what, did)
			}
			return nil
		}))
	}
	for r.did().Blocked == 0 {
		send(10_000)
	}
	set([]byte("1 2 3"))
	before, began := r.did(), time.Now()
	must.OK(t, unix.SetsockoptInt(<-r.out, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 16<<20))
	await("trying again", func(did message.Stats) bool { return did.Sends > before.Sends })
	time.Sleep(time.Second)
	after, lasted := r.did(), time.Since(began)
	if after.Messages > before.Messages {
		t.Fatalf("the kernel had memory for %d messages", after.Messages-before.Messages)
	}
	if calls := after.Sends - before.Sends; calls > uint64(lasted/(10*time.Millisecond)) {
		t.Errorf("%d sends in %v without memory", calls, lasted)
	}
	set(usual)
	await("going on", func(did message.Stats) bool { return did.Messages == uint64(sent) })
	close(release)
	must.OK(t, p.shutDown())
	check.Equalf(t, <-got, sent, "messages arrived")
	r.end(t, message.ClientShutdown)
}

// Many associations at once: every message arrives once, whole, in order within its
// stream, with its stream and identifier.
func TestRelayKeepsMessages(t *testing.T) {
	s := serve(t, nil, "127.0.0.1:0", options(), echo)
	r := newRig(t, config(64<<10), proxied(64<<10), s.addr)
	var all sync.WaitGroup
	for a := range 20 {
		all.Go(func() {
			check.OKf(t, exchange(r.addr, uint64(a), 40), "association %d", a)
		})
	}
	all.Wait()
	for range 20 {
		r.end(t, message.ClientShutdown)
	}
}

// exchange sends messages of random size to an echo and compares what comes back.
func exchange(to netip.AddrPort, seed uint64, messages int) error {
	p, err := dial(nil, to.String(), options())
	if err != nil {
		return err
	}
	return exchangeOver(p, seed, messages)
}

func exchangeOver(p *peer, seed uint64, messages int) error {
	return exchangeWhile(p, seed, 64<<10, func(i int) bool { return i < messages })
}

// exchangeWhile sends messages of at most size bytes to an echo while more returns true for the
// number of sent ones. It checks that each comes back once, as it was, and in its stream's order
// unless it is unordered. Then it shuts the association down.
func exchangeWhile(p *peer, seed uint64, size int, more func(i int) bool) error {
	defer p.abort()
	r := rand.New(rand.NewPCG(seed, 1))
	sent := make(map[uint32]note)
	next := make(map[uint16][]uint32) // by stream: the ordered messages to come
	const window = 8
	for i := 0; more(i) || len(sent) > 0; {
		if len(sent) < window && more(i) {
			n := note{sys.MessageInfo{PPID: uint32(i), Stream: uint16(r.IntN(8)), Unordered: r.IntN(4) == 0}, make([]byte, 1+r.IntN(size))}
			for j := range n.text {
				n.text[j] = byte(i + j + int(seed))
			}
			sent[n.PPID] = n
			if !n.Unordered {
				next[n.Stream] = append(next[n.Stream], n.PPID)
			}
			if err := p.send(n); err != nil {
				return err
			}
			i++
			continue
		}
		got, err := p.receive()
		if err != nil {
			return fmt.Errorf("%d messages are missing: %w", len(sent), err)
		}
		want, is := sent[got.PPID]
		if !is || got.MessageInfo != want.MessageInfo || !bytes.Equal(got.text, want.text) {
			return fmt.Errorf("got %+v of %d bytes, want %+v of %d", got.MessageInfo, len(got.text), want.MessageInfo, len(want.text))
		}
		delete(sent, got.PPID)
		if !want.Unordered {
			if first := next[want.Stream][0]; first != got.PPID {
				return fmt.Errorf("message %d came in the place of %d", got.PPID, first)
			}
			next[want.Stream] = next[want.Stream][1:]
		}
	}
	if err := p.shutDown(); err != nil {
		return err
	}
	if _, err := p.receive(); !errors.Is(err, errShutDown) {
		return err
	}
	return nil
}
