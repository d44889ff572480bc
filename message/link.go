package message

import (
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// The sides of a link, which are also the tags of its registrations. A direction has
// the index of its source.
const (
	client   = 0
	endpoint = 1
)

// Owner receives the end of a link.
type Owner interface {
	// LinkEnded is called exactly once for each Start, on the loop's goroutine, after
	// both descriptors are closed, possibly before Start returns. The link may be
	// reused after LinkEnded has returned.
	LinkEnded(end End)
}

// Patient is an Owner whose links have idle timeouts of their own.
type Patient interface {
	// QuietFor returns how long the link may be quiet; 0 means for ever. idle and
	// halfClosed are what the Config says.
	QuietFor(isHalfClosed bool, idle, halfClosed time.Duration) time.Duration
}

// Socket is a socket that Start takes over.
type Socket struct {
	FD      int
	Reg     poll.Registration // if it is registered, level-triggered
	Streams uint16            // that its peer grants us
}

// Link is one relayed association, embedded in its owner's state. The zero Link is
// ready for Start. Exported methods may be called at any time on the loop's goroutine.
type Link struct {
	worker *Worker
	owner  Owner
	timer  poll.Timer
	moved  int64 // time of the last message, roughly
	first  int64 // time of the endpoint's first message; 0: none yet
	until  int64 // end of draining
	pause  int64 // between two looks while draining; what was unsent at the last look while closing
	sides  [2]side
	facts  facts
	end    End // why it is draining or closing
}

// facts are what is known of a link.
type facts uint8

const (
	running  facts = 1 << iota
	closing        // one side has shut down
	draining       // one side aborted; the other gets what was received
	starved        // the kernel lacks memory to send, and epoll cannot tell when it has some
)

// side is a socket, and the direction that begins there.
type side struct {
	fd       int32
	streams  uint16 // that may be used towards this side
	state    state
	failed   uint8       // the association's error, if a send has met it: Linux reports it once
	streak   uint8       // rounds in a row with messages, up to busyAfter
	round    uint32      // the last of them
	watched  poll.Events // of the registration
	reg      poll.Registration
	held     []byte // a message, or its beginning, that was read here
	reserved int    // what MaxHeld counts of it
	info     sys.MessageInfo
	messages uint64 // read here and sent to the other side
	bytes    uint64
}

// state is what is known of a side.
type state uint8

const (
	partial state = 1 << iota // held is the beginning of a message
	blocked                   // nothing is read until the other side has room
	ended                     // the peer has shut down, or aborted: there is nothing more to read
	shut                      // we have shut it down
	deaf                      // it takes no more messages
)

// FromClient returns the messages and bytes that were forwarded to the endpoint.
func (l *Link) FromClient() (messages, bytes uint64) {
	return l.sides[client].messages, l.sides[client].bytes
}

// FromEndpoint returns those that were forwarded to the client.
func (l *Link) FromEndpoint() (messages, bytes uint64) {
	return l.sides[endpoint].messages, l.sides[endpoint].bytes
}

// FirstMessage is when the endpoint's first message was forwarded; 0: not yet.
func (l *Link) FirstMessage() int64 { return l.first }

// Moved is the time of the last message, roughly, by poll.Nanotime; 0 before Start.
func (l *Link) Moved() int64 { return l.moved }

// Start begins to forward. The endpoint's socket may be registered already.
func (w *Worker) Start(l *Link, c, e Socket, owner Owner) {
	w.prepare()
	*l = Link{worker: w, owner: owner, moved: w.loop.Now(), facts: running}
	w.stats.Links++
	w.stats.Open++
	for i, s := range []Socket{c, e} {
		l.sides[i] = side{fd: int32(s.FD), reg: s.Reg, streams: s.Streams}
		if s.Reg.Valid() {
			w.loop.Hand(s.Reg, uint8(i), l)
		}
	}
	l.watch(client)
	if l.facts&running != 0 {
		l.watch(endpoint)
	}
	if l.facts&running != 0 {
		l.setTimer()
	}
}

// watch has the loop report what side i waits for. Registrations are level-triggered, so
// that a read need not find out that there is nothing more.
func (l *Link) watch(i int) {
	s, w := &l.sides[i], l.worker
	var want poll.Events
	if s.state&(blocked|ended) == 0 {
		want |= poll.Readable
	}
	if l.sides[1-i].state&blocked != 0 && l.facts&starved == 0 {
		want |= poll.Writable
	}
	var err error
	switch {
	case want == 0 && s.state&ended != 0:
		// The kernel would report its end again and again.
		if s.reg.Valid() {
			w.loop.Remove(s.reg)
			s.reg, s.watched = poll.Registration{}, 0
		}
		return
	case !s.reg.Valid():
		s.reg, err = w.loop.Add(int(s.fd), uint8(i), want, l)
	case want != s.watched:
		err = w.loop.Modify(s.reg, want)
	}
	if s.watched = want; err != nil {
		l.finish(Limit)
	}
}

// HandleEvents implements poll.Handler.
func (l *Link) HandleEvents(tag uint8, ev poll.Events) {
	i := int(tag)
	s, other := &l.sides[i], &l.sides[1-i]
	l.moved = l.worker.loop.Lately()
	if ev&poll.Writable != 0 && other.state&blocked != 0 {
		l.unblock(1 - i)
	}
	if l.facts&running == 0 {
		return
	}
	if ev&(poll.Failed|poll.HungUp) != 0 && s.state&blocked != 0 {
		l.failsBlocked(i)
		return
	}
	if s.state&(blocked|ended) == 0 && ev&(poll.Readable|poll.Failed|poll.HungUp|poll.PeerDone) != 0 {
		l.run(i)
	}
}

// failsBlocked notes that side i has failed while the other side has no room. It is read
// again, and its error found, once there is room, for which there is a deadline. The loop
// would report the error until then.
func (l *Link) failsBlocked(i int) {
	s, w := &l.sides[i], l.worker
	s.state |= deaf
	if s.reg.Valid() {
		w.loop.Remove(s.reg)
		s.reg, s.watched = poll.Registration{}, 0
	}
	if l.sides[1-i].state&blocked != 0 {
		l.letGo(1 - i)
	}
	if l.until == 0 {
		l.until = w.loop.Now() + int64(w.config.DrainTimeout)
		l.setTimer()
	}
}

// HandleTimer implements poll.TimerHandler.
func (l *Link) HandleTimer(*poll.Timer) {
	now := l.worker.loop.Now()
	if l.facts&starved != 0 {
		l.tryAgain()
		if l.facts&running == 0 {
			return
		}
	}
	switch {
	case l.facts&draining != 0:
		l.drained()
		return
	case l.until != 0 && now >= l.until:
		// A side has failed and the other one has taken nothing for too long.
		l.timedOut()
		return
	case l.patience() > 0 && now >= l.moved+l.patience():
		if l.facts&closing != 0 && l.goesOn() {
			break
		}
		l.finish(Idle)
		return
	}
	l.setTimer()
}

// goesOn reports whether the side that is being shut down still takes what it was sent.
func (l *Link) goesOn() bool {
	unsent := int64(0)
	for i := range l.sides {
		if l.sides[i].state&shut != 0 {
			unsent = int64(l.worker.kernel.unsent(int(l.sides[i].fd)))
		}
	}
	was := l.pause
	l.pause = unsent
	if unsent == 0 || unsent == was {
		return false
	}
	l.moved = l.worker.loop.Now()
	return true
}

// starve has direction i wait for the timer instead of for room: the other side, which
// epoll reports as writable, took nothing, as the memory of all associations
// (net.sctp.sctp_mem) is used up. The level-triggered registration would report it again
// at once.
func (l *Link) starve(i int) {
	l.facts |= starved
	l.watch(1 - i)
	if l.facts&running != 0 {
		l.setTimer()
	}
}

// tryAgain waits for room again.
func (l *Link) tryAgain() {
	l.facts &^= starved
	for i := range l.sides {
		if l.facts&running != 0 && l.sides[i].state&blocked != 0 && l.sides[1-i].state&deaf == 0 {
			l.watch(1 - i)
		}
	}
}

// setTimer schedules the nearest deadline.
func (l *Link) setTimer() {
	at := int64(0)
	if quiet := l.patience(); quiet > 0 {
		at = l.moved + quiet
	}
	if l.until != 0 && (at == 0 || l.until < at) {
		at = l.until
	}
	if again := l.worker.loop.Now() + int64(starvedPause); l.facts&starved != 0 && (at == 0 || again < at) {
		at = again
	}
	if at != 0 {
		l.worker.loop.Schedule(&l.timer, at, l)
	}
}

// patience returns how long the link may be quiet; 0: for ever.
func (l *Link) patience() int64 {
	c := &l.worker.config
	if p, ok := l.owner.(Patient); ok {
		return int64(p.QuietFor(l.facts&closing != 0, c.IdleTimeout, c.CloseTimeout))
	}
	if l.facts&closing != 0 {
		return int64(c.CloseTimeout)
	}
	return int64(c.IdleTimeout)
}

// Abort ends a link at once and aborts both sides. It does nothing if the link is not
// running.
func (w *Worker) Abort(l *Link, end End) {
	if l.facts&running != 0 {
		l.finish(end)
	}
}

// starvedPause is how long a link waits for memory.
const starvedPause = 50 * time.Millisecond

// lookPause is the shortest pause between two looks while draining.
const lookPause = 2 * time.Millisecond
