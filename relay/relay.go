// Package relay forwards bytes between two connected TCP sockets. A Link joins a
// client's and an endpoint's socket. A Worker forwards the bytes of all links of
// one event loop. The package knows no Services; it neither selects endpoints nor
// logs.
//
// # Use
//
// A Relay holds the state that all workers of a process share. NewWorker creates
// the worker of an event loop. On that loop's goroutine, Start takes over two
// sockets, and LinkEnded of the owner is called exactly once, after both are
// closed. Before Start, Probe can send the client's first bytes while the
// endpoint's socket, which package upstream makes, is still connecting.
// Relay.Pipes, Relay.Bulk and Worker.Stats are safe for concurrent use; all other
// calls belong to the loop's goroutine.
//
// # A direction
//
// A link has two directions, client to endpoint and endpoint to client. They affect
// each other only at their ends. A direction is in one of these states:
//
//	          FIN read,            all delivered:
//	          or known to be next  FIN passed on
//	open ───────────────> ending ───────────────> done
//	  │                      │                      │
//	  └──────────────────────┴──────────────────────┴──> the link is over, when
//	     both directions are done, or either side was reset or timed out, or
//	     the owner aborts it
//
// In the states open and ending, a direction is idle (nothing to read), blocked, or
// has work. It is blocked while the destination is full: it holds the bytes that it
// has read and reads no more until they are written (backpressure). Sockets are
// edge-triggered, so a direction keeps flags: readable stays set until a read is
// short or empty, blocked until the destination is writable.
//
// A direction has one of two modes:
//
//	copying   uses the worker's one buffer. A short read has emptied the socket,
//	          so a second read is unnecessary.
//	          The direction works during the event. A chunk holds what the destination
//	          does not accept: at most 64 KiB, and 16 KiB from then on
//	          until the destination accepts everything again.
//	moving    splices through a pipe, without copying. The direction works in turns
//	          (see below). It borrows a pipe for each turn and keeps it only
//	          while there are bytes in it. Without a pipe, the turn copies.
//
// A direction starts by copying. Two consecutive full reads make it moving. Two
// consecutive turns that moved little make it copying again.
//
// Turns prevent bulk transfers from delaying small messages. After each batch of
// events, the worker gives turns, in order, to moving directions with work, for a
// fraction of a millisecond in total. The others wait for the next round, which
// polls for events first. So a small message waits for at most one such slice,
// however many streams are busy.
//
// # How a link ends
//
// A FIN is forwarded as a half-close after all bytes before it. The other direction
// continues, but at most Config.HalfClosedTimeout without a byte. A reset is
// forwarded as a reset: the other side first gets the bytes before it, as far as it
// accepts them at once. The same applies to a side that no longer answers,
// according to the kernel's keepalive probes or Config.GoneAfter. A link without
// movement for Config.IdleTimeout, and an aborted link, is reset on both sides, so
// that neither peer takes a truncated stream for a complete one. Release ends an idle
// link by a FIN to both sides.
//
// # What a link consists of
//
// A link is plain data: two descriptors; for each direction its state, mode, byte
// count and held bytes (in a chunk or in a pipe, which has two descriptors); the
// times of the start, the last movement and the first byte; and which side closed
// first. An idle link holds two descriptors and no buffer. Between two events,
// there is no other state. To hand a link to another process, remove it from the
// loop (deregister both descriptors, cancel the timer) and transfer these fields
// and descriptors. The other process registers the descriptors, which reports the
// pending events. Registrations, the position in the worker's queue and the timer
// are created again.
package relay

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// End is the reason why a link ended, and the side that ended it.
type End uint8

// The ends of a link. The named side closed first, was reset, or no longer
// answered.
const (
	EndNone         End = iota // the link has not ended
	ClientFin                  // both sides closed, the client first
	ClientReset                // the client sent a reset
	ClientTimeout              // the client no longer answers
	EndpointFin                // both sides closed, the endpoint first
	EndpointReset              // the endpoint sent a reset
	EndpointTimeout            // the endpoint no longer answers
	Idle                       // nothing moved for too long
	Shutdown                   // the proxy stopped
	Limit                      // the proxy ran out of a resource
	Released                   // the owner ended it while it was idle; both sides got a FIN
)

// Config configures links. The zero Config copies and has no timeouts.
type Config struct {
	Splice            bool          // move busy directions through pipes
	IdleTimeout       time.Duration // ends a link after this time without movement; 0: never
	HalfClosedTimeout time.Duration // the same after one side has closed; 0: IdleTimeout
	MaxPipes          int           // bound on the pipes of all workers, two descriptors each; 0 means 128. Beyond it, directions copy
	PipeSize          int           // bytes; 0 means 512 KiB; the kernel may grant less

	// EndpointLiveness is set on the endpoint's socket when a link is LivenessAfter
	// old (0 means 10 s, or half of GoneAfter if that is less). The client's socket
	// inherits its options from the listening socket.
	EndpointLiveness sys.Liveness
	LivenessAfter    time.Duration
	// GoneAfter ends a link if a side acknowledged nothing for this time although
	// bytes are unacknowledged; 0: never. A side that answers may leave bytes
	// unread without limit.
	GoneAfter time.Duration

	// MaxBulk bounds the directions of all workers that have large socket buffers
	// at the same time; 0 means 64. Each takes up to 4 MiB. One with a far source
	// counts twice.
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

// Relay is the state that all workers of a process share: the configuration, and
// the numbers of pipes and of directions with large buffers.
type Relay struct {
	config  Config
	kernel  *kernel
	pipes   atomic.Int64
	bulk    atomic.Int64  // how much of MaxBulk is in use
	refused atomic.Uint64 // how often MaxBulk was exhausted
}

// New creates a relay.
func New(c Config) *Relay {
	return &Relay{config: c.withDefaults(), kernel: &linux}
}

// Pipes returns the current number of pipes. It is safe for concurrent use.
func (r *Relay) Pipes() int { return int(r.pipes.Load()) }

// reserve adds n to count if the sum is at most limit, and reports whether it did. count
// never exceeds limit, not even for a moment while workers reserve at the same time.
func reserve(count *atomic.Int64, n, limit int64) bool {
	for {
		used := count.Load()
		if used+n > limit {
			return false
		}
		if count.CompareAndSwap(used, used+n) {
			return true
		}
	}
}

// bufferSize is the size of a worker's buffer, and so of the largest read while
// copying.
const bufferSize = 64 << 10

// Worker runs the links of one event loop.
type Worker struct {
	relay  *Relay
	config Config
	kernel *kernel
	loop   loop
	buffer []byte
	chunks chunkPool
	pipes  pipePool
	turns  turnQueue
	stats  Stats
	public struct {
		sync.Mutex
		stats Stats
	}
	rounds uint
}

// loop is the part of poll.Loop that a worker uses.
type loop interface {
	Now() int64
	Add(fd int, tag uint8, ev poll.Events, h poll.Handler) (poll.Registration, error)
	Modify(r poll.Registration, ev poll.Events) error
	Hand(r poll.Registration, tag uint8, h poll.Handler) bool
	Remove(r poll.Registration)
	Forget(r poll.Registration)
	Schedule(t *poll.Timer, at int64, h poll.TimerHandler)
	Cancel(t *poll.Timer)
	AtTick(f func())
	AtWait(f func())
	NoWait()
}

var _ loop = (*poll.Loop)(nil)

// NewWorker creates the worker of a loop. Call it before the loop runs or on its
// goroutine. Close releases the worker's pools.
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

// tick runs at the end of each round of the loop.
func (w *Worker) tick() {
	if !w.turns.empty() {
		w.giveTurns()
		if !w.turns.empty() {
			w.loop.NoWait()
		}
	}
	// A busy loop never waits, so publish from time to time.
	if w.rounds++; w.rounds%64 == 0 {
		w.publish()
	}
}

// Close closes the pooled pipes. Abort running links first, because they keep
// theirs.
func (w *Worker) Close() {
	w.pipes.close(w)
	w.publish()
}
