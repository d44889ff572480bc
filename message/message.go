// Package message forwards whole SCTP messages between two one-to-one sockets. A Link
// joins a client's and an endpoint's association. A Worker forwards the messages of all
// links of one event loop. The package knows no Services; it neither selects endpoints
// nor logs. It is for SCTP what package relay is for TCP.
//
// # Use
//
// A Relay holds the state that all workers of a process share. NewWorker creates the
// worker of an event loop. On that loop's goroutine, Start takes over two sockets that
// sys.ListenSCTP and sys.ConnectSCTP have prepared, and LinkEnded of the owner is called
// exactly once, after both are closed. Detach takes a link out of its loop, and Attach brings
// it into another one, also of another process. Worker.Stats and Relay.Held are safe for
// concurrent use; all other calls belong to the loop's goroutine.
//
// # A direction
//
// A message leaves as it came: the same bytes, stream, payload protocol identifier and
// unordered flag. Linux has no explicit end of record for sending, so a message is sent
// in one call, once it is complete. While the destination has no room, the direction
// holds one message and reads no more (backpressure); the kernel's receive window then
// stops the sender. SCTP has one window for all streams, so a slow reader of one stream
// delays the others, with or without a proxy.
//
// A message above Config.MaxMessage ends the link, as does one on a stream that the
// other side did not grant. Held messages take at most about Config.MaxHeld in all: then
// a direction asks for room before it reads.
//
// # How a link ends
//
// SCTP has no half-close. When one side has shut down, all that it sent is delivered,
// then the other side is shut down; what that one still sends is discarded by the
// kernels. An abort, and a peer that is lost, abort the other side after it got what was
// received, for at most Config.DrainTimeout. A cause is not passed on: one-to-one
// sockets cannot send one. An association that its peer restarts counts as aborted.
package message

import (
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// End is the reason why a link ended, and the side that ended it.
type End uint8

// The ends of a link.
const (
	EndNone          End = iota // the link has not ended
	ClientShutdown              // both sides are shut down, the client's first
	ClientAbort                 // the client aborted
	ClientLost                  // the client no longer answers
	EndpointShutdown            // both sides are shut down, the endpoint's first
	EndpointAbort               // the endpoint aborted
	EndpointLost                // the endpoint no longer answers
	TooLarge                    // a message exceeds Config.MaxMessage
	NoStream                    // a message's stream was not granted by its receiver
	Idle                        // no message for too long
	Shutdown                    // the proxy stopped
	Limit                       // the proxy ran out of a resource
)

// Config configures links. All fields but the timeouts must be set.
type Config struct {
	MaxMessage   int           // bytes
	MaxHeld      int64         // bytes of held messages, all links together
	IdleTimeout  time.Duration // ends a link after this time without a message; 0: never
	CloseTimeout time.Duration // the same once one side has shut down; 0: IdleTimeout
	DrainTimeout time.Duration // how long a side may take what was received before the other side's abort; 0: 2 s
}

// Relay is the state that all workers of a process share.
type Relay struct {
	config Config
	kernel kernel
	held   atomic.Int64
}

// New creates a relay.
func New(c Config) *Relay {
	if c.CloseTimeout == 0 || c.IdleTimeout != 0 && c.CloseTimeout > c.IdleTimeout {
		c.CloseTimeout = c.IdleTimeout
	}
	if c.DrainTimeout == 0 {
		c.DrainTimeout = 2 * time.Second
	}
	return &Relay{config: c, kernel: linux{}}
}

// Held returns the bytes of messages that wait for room or for their end. It is safe for
// concurrent use.
func (r *Relay) Held() int64 { return r.held.Load() }

const (
	// largestRead is the size of a worker's buffer unless MaxMessage is less: larger
	// messages are put together in a buffer of their own.
	largestRead = 64 << 10
	// readShare bounds how many messages, and readBytes how many bytes, a direction
	// forwards before others have their turn.
	readShare = 32
	readBytes = 256 << 10
	// busyAfter is after how many rounds in a row with messages a direction reads more
	// than one in a round.
	busyAfter = 2
	// spareBuffers is how many buffers of held messages are kept for later ones.
	spareBuffers = 16
)

// Worker runs the links of one event loop.
type Worker struct {
	relay  *Relay
	config Config
	kernel kernel
	loop   loop
	box    sys.SCTPMailbox
	buffer []byte
	spare  [][]byte
	stats  Stats
	public publicStats
	rounds uint32
}

// loop is the part of poll.Loop that a worker uses.
type loop interface {
	Now() int64
	Lately() int64
	Add(fd int, tag uint8, ev poll.Events, h poll.Handler) (poll.Registration, error)
	Modify(r poll.Registration, ev poll.Events) error
	Hand(r poll.Registration, tag uint8, h poll.Handler) bool
	Remove(r poll.Registration)
	Forget(r poll.Registration)
	Schedule(t *poll.Timer, at int64, h poll.TimerHandler)
	Cancel(t *poll.Timer)
	AtTick(f func())
	AtWait(f func())
}

var _ loop = (*poll.Loop)(nil)

// NewWorker creates the worker of a loop. Call it before the loop runs or on its
// goroutine.
func (r *Relay) NewWorker(l *poll.Loop) *Worker { return r.newWorker(l) }

func (r *Relay) newWorker(l loop) *Worker {
	w := &Worker{relay: r, config: r.config, kernel: r.kernel, loop: l}
	l.AtTick(func() {
		if w.rounds++; w.rounds%64 == 0 { // a busy loop never waits
			w.publish()
		}
	})
	l.AtWait(w.publish)
	return w
}

// prepare makes the buffer for received messages, before the first link.
func (w *Worker) prepare() {
	if w.buffer == nil {
		w.buffer = make([]byte, min(w.config.MaxMessage+1, largestRead))
	}
}

// take returns an empty buffer for at least n bytes.
func (w *Worker) take(n int) []byte {
	if last := len(w.spare) - 1; last >= 0 && cap(w.spare[last]) >= n {
		b := w.spare[last]
		w.spare = w.spare[:last]
		return b[:0]
	}
	return make([]byte, 0, n)
}

// put keeps a buffer for later, unless it is large.
func (w *Worker) put(b []byte) {
	if len(w.spare) < spareBuffers && cap(b) <= largestRead {
		w.spare = append(w.spare, b)
	}
}

// full reports whether no more messages should be held.
func (w *Worker) full() bool { return w.relay.held.Load() >= w.config.MaxHeld }

// reserve counts bytes that are held, or no longer held.
func (w *Worker) reserve(n int) { w.relay.held.Add(int64(n)) }
