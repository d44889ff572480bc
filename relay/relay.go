// Package relay moves bytes between two connected sockets, as fast as a process
// can: a Link joins a client's socket and an endpoint's, and a Worker moves the
// bytes of all links of one event loop.
//
// # Use
//
// A Relay holds what the workers of a process share. NewWorker ties a worker to
// an event loop; then, on that loop's goroutine, Start hands two sockets over
// and the owner's LinkEnded is called exactly once, when both are closed.
// Before that, Probe may carry the client's first bytes over while the endpoint's
// socket is still connecting; package upstream makes that socket. Everything but
// Relay.Pipes, Relay.Bulk and Worker.Stats belongs to the loop's goroutine.
//
// # A direction
//
// A link has two directions, client to endpoint and endpoint to client, which
// know of each other only when one ends. A direction is in one of these states:
//
//	          FIN read,            all delivered:
//	          or known to be next  FIN passed on
//	open ───────────────> ending ───────────────> done
//	  │                      │                      │
//	  └──────────────────────┴──────────────────────┴──> the link is over, when
//	     both directions are done, or either side was reset or timed out, or
//	     the owner aborts it
//
// Within open and ending it is idle (nothing to read), or blocked (the
// destination takes no more; what was read and not yet written is held, and
// nothing more is read until it is gone: backpressure), or has work. Sockets
// are edge-triggered, so a direction remembers what it was told: readable stays
// set until a read comes back short or empty, blocked until the destination is
// reported writable.
//
// How bytes move has two modes:
//
//	copying   through the worker's one buffer. A read that comes back short has
//	          emptied the socket, so that no second one is made to find that out.
//	          Work is done in the event itself. What the destination does not
//	          take is held in a chunk: 64 KiB at most, and 16 KiB from then on
//	          until it takes everything again.
//	moving    through a pipe, by splice, without copying. Work is done in turns
//	          (see below). A pipe is borrowed for a turn and kept beyond it only
//	          while it holds bytes; without one, the turn copies.
//
// A direction begins by copying. Two full reads in a row make it moving; two
// turns in a row that moved little make it copying again.
//
// Turns keep bulk from starving the rest: after each batch of events the worker
// gives turns, in order, to the moving directions that have work, for a
// fraction of a millisecond altogether; the rest of them wait for the next
// round, which looks for events first. So a small message waits for one such
// slice at most, however many streams are busy.
//
// # How a link ends
//
// A FIN is passed on when everything before it is delivered, as a half-close;
// the other direction goes on, but no longer than Config.HalfClosedTimeout
// without a byte. A reset is passed on as a reset: what its sender sent before
// is delivered as far as the other side takes it at once, then the other side
// is reset too. The same goes for a side that no longer answers, which the
// kernel's keepalive probes or Config.GoneAfter find out.
// A link that moved nothing for Config.IdleTimeout, or is aborted, is reset on
// both sides, so that neither takes a truncated stream for a whole one.
//
// # What a link consists of
//
// Plain data: two descriptors; for each direction its state and mode, the
// number of bytes, the bytes held (in a buffer or in a pipe, whose two
// descriptors are part of them); the times of the start, the last movement and
// the first byte; who closed first. An idle link holds its two descriptors and
// no buffer. Between two events nothing of a link is anywhere else: taking it out
// of the loop at that moment (deregister both descriptors, cancel the timer) and
// writing these fields down with the descriptors is all that handing it to
// another process takes; that process registers the descriptors, which reports
// what is ready, and goes on. Registrations, the place in the worker's queue and
// the timer are made anew and need not travel.
package relay

import (
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// End is how a link ended, and by whom.
type End uint8

// The ends of a link. The side that is named closed first, or is the one that
// was reset or lost.
const (
	EndNone         End = iota // it has not
	ClientFin                  // both sides closed, the client first
	ClientReset                // the client sent a reset
	ClientTimeout              // the client no longer answers
	EndpointFin                // both sides closed, the endpoint first
	EndpointReset              // the endpoint sent a reset
	EndpointTimeout            // the endpoint no longer answers
	Idle                       // nothing moved for too long
	Shutdown                   // the proxy stopped
	Limit                      // the proxy ran out of something it needs
)

var endNames = [...]string{"none", "client_fin", "client_reset", "client_timeout", "endpoint_fin", "endpoint_reset", "endpoint_timeout", "idle", "shutdown", "limit"}

// String returns the name that connection records use.
func (e End) String() string {
	if int(e) < len(endNames) {
		return endNames[e]
	}
	return "unknown"
}

// Config is how links are run. The zero Config copies and never times out.
type Config struct {
	Splice            bool          // move busy directions through pipes
	IdleTimeout       time.Duration // end a link that moved nothing for so long; 0: never
	HalfClosedTimeout time.Duration // the same once one side has closed; 0: IdleTimeout
	MaxPipes          int           // pipes at the same time in all workers; 0 means 128. Two descriptors each; beyond it directions copy
	PipeSize          int           // bytes; 0 means 512 KiB; a kernel that gives less is taken at its word

	// EndpointLiveness is set on the endpoint's socket once a link has lived
	// LivenessAfter (0 means 10 s, or half of GoneAfter if that is less); the client's has it from its listener.
	EndpointLiveness sys.Liveness
	LivenessAfter    time.Duration
	// GoneAfter ends a link with a side that acknowledged nothing for so long,
	// though bytes wait for that; 0: never. A side that answers may leave them
	// unread for as long as it likes.
	GoneAfter time.Duration

	// MaxBulk is how many directions have large socket buffers at the same time in all
	// workers; 0 means 64. Each takes up to 4 MiB; one whose source is far away counts
	// as two.
	MaxBulk int
}

func (c Config) withDefaults() Config {
	if c.HalfClosedTimeout == 0 || c.IdleTimeout != 0 && c.HalfClosedTimeout > c.IdleTimeout {
		c.HalfClosedTimeout = c.IdleTimeout
	}
	if c.MaxPipes == 0 {
		c.MaxPipes = 128
	}
	if c.MaxBulk == 0 {
		c.MaxBulk = 64
	}
	if c.PipeSize == 0 {
		c.PipeSize = 512 << 10
	}
	if c.LivenessAfter == 0 {
		c.LivenessAfter = 10 * time.Second
		if c.GoneAfter > 0 {
			c.LivenessAfter = min(c.LivenessAfter, c.GoneAfter/2)
		}
	}
	return c
}

// Relay is what the workers of a process share: the configuration and the bounds
// on pipes and bulk.
type Relay struct {
	config  Config
	kernel  kernel
	pipes   atomic.Int64
	bulk    atomic.Int64  // places of MaxBulk in use
	refused atomic.Uint64 // times that there was none
}

// New makes a relay.
func New(c Config) *Relay {
	return &Relay{config: c.withDefaults(), kernel: linux{}}
}

// Pipes returns how many pipes exist. It may be called from any goroutine.
func (r *Relay) Pipes() int { return int(r.pipes.Load()) }

// bufferSize is the size of a worker's buffer and so of the largest read while
// copying.
const bufferSize = 64 << 10

// Worker runs the links of one event loop.
type Worker struct {
	relay  *Relay
	config Config
	kernel kernel
	loop   loop
	buffer []byte
	chunks chunkPool
	pipes  pipePool
	turns  turnQueue
	stats  Stats
	public publicStats
	rounds uint
}

// loop is what a worker needs of a poll.Loop.
type loop interface {
	Now() int64
	Add(fd int, tag uint8, ev poll.Events, h poll.Handler) (poll.Registration, error)
	Modify(r poll.Registration, ev poll.Events) error
	Hand(r poll.Registration, tag uint8, h poll.Handler) bool
	Forget(r poll.Registration)
	Schedule(t *poll.Timer, at int64, h poll.TimerHandler)
	Cancel(t *poll.Timer)
	AtTick(f func())
	AtWait(f func())
	NoWait()
}

var _ loop = (*poll.Loop)(nil)

// NewWorker makes the worker of a loop, before the loop runs or on its
// goroutine. It lives as long as the loop; Close releases what it pools.
func (r *Relay) NewWorker(l *poll.Loop) *Worker { return r.newWorker(l) }

func (r *Relay) newWorker(l loop) *Worker {
	w := &Worker{
		relay:  r,
		config: r.config,
		kernel: r.kernel,
		loop:   l,
		buffer: make([]byte, bufferSize),
	}
	l.AtTick(w.tick)
	l.AtWait(w.publish)
	return w
}

// tick ends each of the loop's rounds.
func (w *Worker) tick() {
	if !w.turns.empty() {
		w.giveTurns()
		if !w.turns.empty() {
			w.loop.NoWait()
		}
	}
	// A busy loop does not wait: publish now and then.
	if w.rounds++; w.rounds%64 == 0 {
		w.publish()
	}
}

// Close closes the pooled pipes. Links that still run keep theirs: abort them
// first.
func (w *Worker) Close() {
	w.pipes.close(w)
	w.publish()
}
