package relay

import (
	"math/rand/v2"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// quiet is a play whose peers do only what the test says.
func quiet(config Config) *play {
	p := newPlay(rand.New(rand.NewPCG(1, 1)).IntN, config)
	p.worker.Start(p.link, Socket{FD: p.socks[client].fd}, Socket{FD: p.socks[endpoint].fd}, p)
	p.settle()
	return p
}

func (p *play) wantEnds(t *testing.T, want ...End) {
	t.Helper()
	must.Equal(t, p.fault, "")
	if len(p.ends) != len(want) || len(want) == 1 && p.ends[0] != want[0] {
		t.Fatalf("ended %v, want %v", p.ends, want)
	}
}

const second = int64(time.Second)

func TestIdleTimeout(t *testing.T) {
	p := quiet(Config{IdleTimeout: 100 * time.Second})
	for range 10 {
		p.elapse(90 * second)
		p.peerSends(endpoint, 10)
		p.settle()
	}
	// The timer was left alone all the time.
	p.wantEnds(t)
	p.elapse(99 * second)
	p.wantEnds(t)
	p.elapse(second)
	p.wantEnds(t, Idle)
	if p.socks[client].inOrder || p.socks[endpoint].inOrder {
		t.Fatal("an idle link should be reset on both sides")
	}
}

// TestHalfClosedTimeout: once one side has closed, the other has less patience
// to count on, from then on.
func TestHalfClosedTimeout(t *testing.T) {
	p := quiet(Config{IdleTimeout: 1000 * time.Second, HalfClosedTimeout: 10 * time.Second})
	p.elapse(500 * second)
	p.peerCloses(client, false)
	p.settle()
	for range 5 {
		p.elapse(9 * second)
		p.peerSends(endpoint, 1)
		p.settle()
	}
	p.wantEnds(t)
	p.elapse(10 * second)
	p.wantEnds(t, Idle)
}

// TestIdleBeforeTheClock: a link that moves to a process that has just begun, and there may be
// quiet for less time than it has been, ends at once.
func TestIdleBeforeTheClock(t *testing.T) {
	p := quiet(Config{IdleTimeout: 1000 * time.Second})
	p.elapse(500 * second)
	m, ok := p.worker.Detach(p.link)
	if !ok {
		t.Fatal("the link stays")
	}
	p.now, p.worker.config.IdleTimeout = second, 100*time.Second
	p.link = new(Link)
	p.worker.Attach(p.link, &m, p)
	p.elapse(0)
	p.wantEnds(t, Idle)
}

func TestNoTimeout(t *testing.T) {
	p := quiet(Config{})
	p.peerCloses(client, false)
	p.settle()
	p.elapse(1e6 * second)
	p.wantEnds(t)
	must.Equalf(t, len(p.timers), 0, "a timer runs for nothing")
}

// TestLiveness: the endpoint's socket gets its options once the link has lived a
// while, not before.
func TestLiveness(t *testing.T) {
	for _, idle := range []time.Duration{0, time.Hour} {
		p := quiet(Config{IdleTimeout: idle, EndpointLiveness: sys.Liveness{Count: 1}, LivenessAfter: 5 * time.Second})
		p.elapse(5*second - 1)
		if p.socks[endpoint].live {
			t.Fatal("options too early")
		}
		p.elapse(1)
		if !p.socks[endpoint].live || p.socks[client].live {
			t.Fatal("no options")
		}
		p.elapse(idle.Nanoseconds())
		p.wantEnds(t, []End{Idle}[:min(1, int(idle))]...)
	}
}

// TestGonePeerIsGivenUp: a side that leaves bytes unacknowledged and does not
// answer is given up in time, also while the other side goes on sending.
func TestGonePeerIsGivenUp(t *testing.T) {
	for side, want := range []End{ClientTimeout, EndpointTimeout} {
		for _, sends := range []bool{false, true} {
			p := quiet(Config{GoneAfter: time.Minute, IdleTimeout: 24 * time.Hour})
			p.elapse(1000 * second)
			p.peerSends(1-side, 100)
			p.settle()
			gone := p.socks[side]
			gone.pending, gone.acked, gone.unanswered = true, p.now, unansweredLimit
			for range 59 {
				p.elapse(second)
				if sends {
					p.peerSends(1-side, 1)
					p.settle()
				}
			}
			p.wantEnds(t)
			p.elapse(10 * second)
			p.wantEnds(t, want)
			if p.socks[1-side].inOrder {
				t.Fatal("the other side is not reset")
			}
		}
	}
}

// TestPausedPeerIsNotGivenUp: a side that answers may leave bytes unread for ever,
// though window probes are two minutes apart, one is lost and the next on its way.
func TestPausedPeerIsNotGivenUp(t *testing.T) {
	p := quiet(Config{GoneAfter: time.Minute})
	p.peerSends(endpoint, 100)
	p.settle()
	c := p.socks[client]
	c.pending, c.acked = true, p.now
	for range 1000 {
		p.elapse(120 * second)
		c.unanswered = unansweredLimit - 1
		p.elapse(20 * second) // there is a look meanwhile
		c.unanswered, c.acked = 0, p.now
	}
	p.wantEnds(t)
}

// TestIdleLinkIsNotLookedAt: a link that does not move costs no look, until it
// moves.
func TestIdleLinkIsNotLookedAt(t *testing.T) {
	p := quiet(Config{GoneAfter: time.Minute, IdleTimeout: 24 * time.Hour})
	for range 3 {
		p.elapse(100 * second)
		before := p.socks[client].looks
		p.elapse(3600 * second)
		must.Equalf(t, p.socks[client].looks-before, 0, "looks at an idle link")
		p.peerSends(client, 1)
		p.settle()
		p.elapse(100 * second)
		if n := p.socks[client].looks - before; n < 1 || n > 4 {
			t.Fatalf("a link that moved was looked at %d times", n)
		}
	}
	p.wantEnds(t)
}

func TestAbort(t *testing.T) {
	p := quiet(Config{Splice: true})
	p.peerSends(client, 100)
	p.settle()
	p.worker.Abort(p.link, Shutdown)
	p.worker.Abort(p.link, Shutdown)
	p.wantEnds(t, Shutdown)
	if p.socks[client].inOrder || p.socks[endpoint].inOrder || p.link.BytesUp() != 100 {
		t.Fatal("not reset on both sides")
	}
}

// TestAbortInTheLine: a link that waits for its turn, with bytes in a pipe, is
// taken out of the line; others keep their places.
func TestAbortInTheLine(t *testing.T) {
	p := quiet(Config{Splice: true})
	p.socks[endpoint].room, p.socks[endpoint].capacity = 100<<10, 100<<10
	p.peerSends(client, 1<<20)
	for p.link.sides[client].inPipe == 0 {
		if !p.round() {
			p.peerReads(endpoint, 100<<10)
		}
	}
	p.worker.turns.add(p.link, client)
	p.worker.Abort(p.link, Shutdown)
	p.wantEnds(t, Shutdown)
	if !p.worker.turns.empty() || p.relay.Pipes() != len(p.worker.pipes.free) {
		t.Fatal("something is left")
	}
}

// TestTimeoutIsNotAReset: the end says whether a side was reset or stopped
// answering, also where a router has said why it cannot.
func TestTimeoutIsNotAReset(t *testing.T) {
	for _, side := range []int{client, endpoint} {
		for e, want := range map[sys.Errno][2]End{
			sys.ECONNRESET:    {ClientReset, EndpointReset},
			sys.ETIMEDOUT:     {ClientTimeout, EndpointTimeout},
			unix.EHOSTUNREACH: {ClientTimeout, EndpointTimeout},
			unix.ENETUNREACH:  {ClientTimeout, EndpointTimeout},
			sys.ECONNREFUSED:  {ClientTimeout, EndpointTimeout},
		} {
			p := quiet(Config{})
			p.peerResets(side, e)
			p.settle()
			p.wantEnds(t, want[side])
		}
	}
}

// full is a loop whose epoll has no room for more.
type full struct{ *fake }

func (full) Add(int, uint8, poll.Events, poll.Handler) (poll.Registration, error) {
	return poll.Registration{}, sys.ENOMEM
}

func TestNoRoomInEpoll(t *testing.T) {
	p := quiet(Config{})
	f := newFake(p.choose)
	p.relay.kernel = f.kernel()
	w := p.relay.newWorker(full{f})
	w.Start(new(Link), Socket{FD: f.socks[client].fd}, Socket{FD: f.socks[endpoint].fd}, p)
	p.wantEnds(t, Limit)
	if f.socks[client].inOrder || !f.socks[endpoint].closed {
		t.Fatal("the sockets are left open")
	}
}

var endNames = [...]string{"none", "client_fin", "client_reset", "client_timeout", "endpoint_fin", "endpoint_reset", "endpoint_timeout", "idle", "shutdown", "limit", "released"}

// String returns the name that connection records use.
func (e End) String() string {
	if int(e) < len(endNames) {
		return endNames[e]
	}
	return "unknown"
}

func TestNames(t *testing.T) {
	for end, name := range map[End]string{EndNone: "none", ClientFin: "client_fin", EndpointReset: "endpoint_reset", EndpointTimeout: "endpoint_timeout", Limit: "limit", 99: "unknown"} {
		check.Equalf(t, end.String(), name, "%d is called %q", end, end)
	}
}

// TestBuffersOfBulk: buffers grow for a direction that delivers much, sooner if its
// source is far away.
func TestBuffersOfBulk(t *testing.T) {
	for side := range 2 {
		for _, rtt := range []time.Duration{50 * time.Microsecond, 20 * time.Millisecond} {
			p := quiet(Config{Splice: true})
			source, destination := p.socks[side], p.socks[1-side]
			source.rtt = rtt
			deliver := func(bytes int) {
				for source.sent < bytes {
					p.peerSends(side, 200<<10)
					p.peerReads(1-side, 1<<20)
					p.settle()
				}
			}
			want := func(buffer, unsent int) {
				t.Helper()
				if source.buffer != buffer || destination.unsent != unsent || source.unsent != 0 || destination.buffer != 0 {
					t.Fatalf("side %d, %v away, after %d bytes: buffer %d, unsent %d, want %d, %d", side, rtt, source.sent, source.buffer, destination.unsent, buffer, unsent)
				}
			}
			grown, limit := 0, 0
			if side == client {
				limit = sys.UnsentLimit
			}
			deliver(600 << 10)
			want(grown, limit)
			if rtt > farAway {
				grown, limit = -1, bulkBuffer
			}
			deliver(4 << 20)
			want(grown, limit)
			if rtt < farAway {
				grown = bulkBuffer
			}
			deliver(20 << 20)
			want(grown, bulkBuffer)
			must.Equal(t, p.fault, "")
		}
	}
}

// TestNoDelayFromTheSecondWriteOn: the endpoint's socket is set not to delay small
// writes before the second one, which is the first that could be.
func TestNoDelayFromTheSecondWriteOn(t *testing.T) {
	p := quiet(Config{Splice: true})
	for i, want := range []bool{false, true, true} {
		p.peerSends(client, 100)
		p.settle()
		check.Equalf(t, p.socks[endpoint].noDelay, want, "after write %d", i+1)
	}
	if p.socks[client].noDelay {
		t.Error("the client's socket has it from its listener")
	}
}

// patient is an owner whose links may be quiet for a time of its own.
type patient struct {
	*play
	quiet time.Duration
}

func (p patient) QuietFor(halfClosed bool, idle, half time.Duration) time.Duration {
	if halfClosed {
		return half
	}
	return min(p.quiet, idle)
}

// TestOwnersTimeout: the owner decides how long its link may be quiet.
func TestOwnersTimeout(t *testing.T) {
	p := newPlay(rand.New(rand.NewPCG(1, 1)).IntN, Config{IdleTimeout: 100 * time.Second, HalfClosedTimeout: 20 * time.Second})
	p.worker.Start(p.link, Socket{FD: p.socks[client].fd}, Socket{FD: p.socks[endpoint].fd}, patient{p, 10 * time.Second})
	p.settle()
	p.elapse(9 * second)
	p.peerCloses(client, false)
	p.settle()
	p.elapse(19 * second)
	p.peerSends(endpoint, 1)
	p.settle()
	p.elapse(19 * second)
	p.wantEnds(t)
	p.elapse(second)
	p.wantEnds(t, Idle)
	p = newPlay(rand.New(rand.NewPCG(1, 1)).IntN, Config{IdleTimeout: 100 * time.Second})
	p.worker.Start(p.link, Socket{FD: p.socks[client].fd}, Socket{FD: p.socks[endpoint].fd}, patient{p, 10 * time.Second})
	p.settle()
	p.elapse(10 * second)
	p.wantEnds(t, Idle)
}
