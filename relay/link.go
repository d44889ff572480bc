package relay

import (
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// The sides of a link, which are also the tags of its registrations. A direction
// has the index of its source.
const (
	client   = 0
	endpoint = 1
)

// Owner receives the end of a link.
type Owner interface {
	// LinkEnded is called exactly once for each Start, on the loop's goroutine,
	// after both descriptors are closed, possibly before Start returns. The link
	// may be reused after LinkEnded has returned.
	LinkEnded(l *Link, end End)
}

// Patient is an Owner whose links have idle timeouts of their own.
type Patient interface {
	// QuietFor returns how long the link may be quiet; 0 means for ever. idle and
	// halfClosed are what the Config says.
	QuietFor(isHalfClosed bool, idle, halfClosed time.Duration) time.Duration
}

// Witness is an Owner that looks at the sockets of a link before they are closed.
type Witness interface {
	// LinkEnding is called right before LinkEnded, while Descriptors are open.
	LinkEnding(*Link)
}

// Socket is a socket that Start takes over.
type Socket struct {
	FD  int
	Reg poll.Registration // its registration for Watch, if there is one
	// Ready are Reg's last events. Without Readable, nothing is read before the
	// next event.
	Ready poll.Events
}

// Link is one relayed connection, embedded in its owner's connection state. The
// zero Link is ready for Start. Exported fields may be read at any time on the
// loop's goroutine.
type Link struct {
	worker *Worker
	owner  Owner
	timer  poll.Timer
	moved  int64 // time of the last movement
	sides  [2]side
	facts  fact
	// preface is how many bytes Prepend put before the client's.
	preface uint16

	// FirstByte is the time of the endpoint's first byte by poll.Nanotime, or 0.
	FirstByte int64
}

// BytesUp returns how many bytes of the client were forwarded to the endpoint.
func (l *Link) BytesUp() uint64 {
	return l.sides[client].bytes - min(l.sides[client].bytes, uint64(l.preface))
}

// BytesDown returns how many bytes were forwarded from the endpoint to the client.
func (l *Link) BytesDown() uint64 { return l.sides[endpoint].bytes }

// Descriptors returns the sockets of a running link to its client and its endpoint.
func (l *Link) Descriptors() (ofClient, ofEndpoint int) {
	return int(l.sides[client].fd), int(l.sides[endpoint].fd)
}

// fact is a set of flags of a link.
type fact uint8

const (
	running       fact = 1 << iota // between Start and LinkEnded
	closing                        // a FIN has arrived
	endpointFirst                  // the first FIN was the endpoint's
	halfClosed                     // one direction is done
	matured                        // the endpoint's liveness options are set
	_                              // had a meaning in processes that may hand links over
	undelayed                      // the endpoint's socket has TCP_NODELAY
	watched                        // the timer is set for the next check of acknowledgements
)

// Start transfers two connected, non-blocking sockets to the link, which closes
// them at its end. They must come from sys.ListenTCP and sys.ConnectTCP or have the
// same options: urgent bytes stay inline, and closing resets the connection.
func (w *Worker) Start(l *Link, clientSocket, endpointSocket Socket, owner Owner) {
	w.stats.Links++
	w.stats.Open++
	now := w.loop.Now()
	l.worker, l.owner = w, owner
	l.moved, l.FirstByte = now, 0
	l.facts = running
	c, e := &l.sides[client], &l.sides[endpoint]
	if c.state&probed == 0 {
		*c = side{}
	}
	if e.state&probed == 0 {
		*e = side{}
	}
	l.take(client, clientSocket)
	l.take(endpoint, endpointSocket)
	if c.state&probed == 0 && !clientSocket.Reg.Valid() {
		// Most clients have sent their request by now.
		c.state |= readable
	}
	if e.held != nil {
		l.came(endpoint) // Probe read them
	}
	if c.state&failed != 0 {
		l.lost(client, sys.ECONNRESET)
		return
	}
	if e.state&failed != 0 {
		l.broken(endpoint, sys.ECONNRESET)
		return
	}
	if c.held != nil || c.state&(readable|ending) != 0 {
		l.run(client)
	}
	if l.facts&running != 0 && e.state&readable != 0 {
		l.run(endpoint)
	}
	l.attend()
}

// attend begins to watch both sides, and sets the timer, unless the link has ended.
func (l *Link) attend() {
	for i := range l.sides {
		if l.facts&running != 0 {
			l.watch(i)
		}
	}
	if l.facts&running != 0 {
		l.setTimer(l.lookInterval())
	}
}

func (l *Link) take(i int, from Socket) {
	s := &l.sides[i]
	s.fd, s.reg = int32(from.FD), from.Reg
	if from.Reg.Valid() {
		s.state |= watchesOut
	}
	if s.state&ending != 0 {
		l.closed(i) // as Probe found out
	}
	l.note(i, from.Ready)
}

// note records the events of side i that concern reading.
func (l *Link) note(i int, ev poll.Events) {
	if ev&(poll.Readable|poll.Urgent|poll.PeerDone|poll.Failed|poll.HungUp) != 0 {
		s := &l.sides[i]
		s.state |= readable
		if ev&poll.PeerDone != 0 {
			s.state |= finKnown
			l.closed(i)
		}
		if ev&poll.Urgent != 0 {
			s.state |= urgent
		}
	}
}

// closed records that side i has sent its FIN.
func (l *Link) closed(i int) {
	if l.facts&closing == 0 {
		l.facts |= closing
		if i == endpoint {
			l.facts |= endpointFirst
		}
	}
}

// Watch are the events to register an endpoint's socket for while it connects.
// Start can then take over the registration unchanged.
const Watch = watchRead | poll.Writable

const watchRead = poll.Readable | poll.PeerDone | poll.Urgent | poll.Edge

// watch registers a side with the loop. It does not ask for Writable: an epoll_ctl
// for the few sockets that ever block is cheaper than an event for each new
// connection.
func (l *Link) watch(i int) {
	s, w := &l.sides[i], l.worker
	if s.reg.Valid() {
		w.loop.Hand(s.reg, uint8(i), l)
		return
	}
	ev := watchRead
	if l.sides[1-i].state&blocked != 0 {
		ev = Watch
		s.state |= watchesOut
	}
	w.stats.Controls++
	reg, err := w.loop.Add(int(s.fd), uint8(i), ev, l)
	if err != nil {
		l.finish(Limit)
		return
	}
	s.reg = reg
}

// await makes the loop report when a side is writable again.
func (l *Link) await(i int) {
	s, w := &l.sides[i], l.worker
	if s.state&watchesOut != 0 || !s.reg.Valid() {
		return // not registered yet: Start will do that
	}
	s.state |= watchesOut
	w.stats.Controls++
	if err := w.loop.Modify(s.reg, Watch); err != nil {
		l.finish(Limit)
	}
}

// HandleEvents implements poll.Handler.
func (l *Link) HandleEvents(tag uint8, ev poll.Events) {
	i := int(tag)
	s := &l.sides[i]
	l.moved = l.worker.loop.Now()
	if l.facts&watched == 0 {
		l.setTimer(l.lookInterval())
	}
	l.note(i, ev)
	if ev&poll.Failed != 0 {
		l.broken(i, 0)
		return
	}
	if s.state&readable != 0 {
		l.run(i)
	}
	other := &l.sides[1-i]
	if ev&(poll.Writable|poll.HungUp) != 0 && other.state&blocked != 0 && l.facts&running != 0 {
		other.state &^= blocked
		l.run(1 - i)
	}
}

// Abort ends a link at once and resets both sides. It does nothing if the link is
// not running.
func (w *Worker) Abort(l *Link, end End) {
	if l.facts&running != 0 {
		l.finish(end)
	}
}

// broken ends the link because side i was reset or no longer answers. It forwards
// the bytes that the side sent before, as far as the other side accepts them at
// once. e is the cause, or 0 if it is unknown.
func (l *Link) broken(i int, e sys.Errno) {
	w, s := l.worker, &l.sides[i]
	if why := l.drain(i); e == 0 {
		e = why // the error follows the bytes
	}
	if e == 0 {
		w.stats.Others++
		e = w.kernel.socketError(int(s.fd))
	}
	l.lost(i, e)
}

// lost is broken for a side without unread bytes.
func (l *Link) lost(i int, e sys.Errno) {
	end := ClientReset
	if i == endpoint {
		end = EndpointReset
	}
	if unanswered(e) {
		end++ // ClientTimeout, EndpointTimeout
	}
	l.finish(end)
}

// unanswered reports whether a connection failed because its peer no longer
// answers: ETIMEDOUT, or the error of an ICMP message in the meantime.
func unanswered(e sys.Errno) bool {
	switch e {
	case 0, sys.ECONNRESET, sys.EPIPE, sys.ECONNABORTED, sys.ENOMEM, sys.ENOBUFS:
		return false
	}
	return true
}

// finish closes both sides and calls the owner. Unless both sides have sent their
// FIN or the link is released, it resets the remaining peers.
func (l *Link) finish(end End) {
	w := l.worker
	inOrder := end == ClientFin || end == EndpointFin || end == Released
	w.loop.Cancel(&l.timer)
	w.turns.remove(l)
	if witness, ok := l.owner.(Witness); ok {
		witness.LinkEnding(l)
	}
	for i := range l.sides {
		s := &l.sides[i]
		w.giveUp(s)
		s.endBulk(w.relay)
		if s.reg.Valid() {
			w.loop.Forget(s.reg)
			s.reg = poll.Registration{}
		}
		w.stats.Closes++
		if inOrder {
			w.stats.Others++
			w.kernel.closeInOrder(int(s.fd))
		} else {
			w.kernel.close(int(s.fd))
		}
		s.fd, s.state, s.streak = -1, 0, 0
	}
	w.stats.Open--
	l.facts &^= running
	owner := l.owner
	l.owner = nil
	owner.LinkEnded(l, end)
}
