package relay

import (
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// The sides of a link, which are also the tags of its registrations. A
// direction has the number of the side that it begins at.
const (
	client   = 0
	endpoint = 1
)

// Owner is told of the end of a link.
type Owner interface {
	// LinkEnded is called exactly once for each Start, on the loop's
	// goroutine, when both descriptors are closed; perhaps before Start
	// returns. The link may be used again after LinkEnded has returned.
	LinkEnded(l *Link, end End)
}

// Socket is one of the two sockets that Start takes over.
type Socket struct {
	FD  int
	Reg poll.Registration // if it is registered already, for Watch
	// Ready is what Reg's last event said. Without Readable in it nothing
	// is read before the next event.
	Ready poll.Events
}

// Link is one relayed connection. It is embedded in what its owner knows of the
// connection; the zero Link is ready for Start. The fields that are exported may
// be read at any time on the loop's goroutine.
type Link struct {
	worker *Worker
	owner  Owner
	timer  poll.Timer
	moved  int64 // when something last happened
	sides  [2]side
	facts  fact

	// FirstByte is when the endpoint's first byte came, in poll.Nanotime's
	// clock; 0: none yet.
	FirstByte int64
}

// BytesUp returns how many bytes went from the client to the endpoint.
func (l *Link) BytesUp() uint64 { return l.sides[client].bytes }

// BytesDown returns how many bytes went from the endpoint to the client.
func (l *Link) BytesDown() uint64 { return l.sides[endpoint].bytes }

// fact is what is known about a link as a whole.
type fact uint8

const (
	running       fact = 1 << iota // between Start and LinkEnded
	closing                        // a FIN has come
	endpointFirst                  // it was the endpoint's
	halfClosed                     // one direction is done
	matured                        // the endpoint's liveness options are set
	bounded                        // the receive buffer of the endpoint's socket grows no more by itself
	undelayed                      // the endpoint's socket has TCP_NODELAY
	watched                        // the timer is set for the next look at what the peers acknowledge
)

// Start hands two connected, non-blocking sockets over to the link, which closes
// them when it ends. They are such as sys.ListenTCP and sys.ConnectTCP make: urgent
// bytes stay in the stream, as ordinary bytes, and closing them resets them.
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
		// The client has mostly sent its request by now.
		c.state |= readable
	}
	if c.state&failed != 0 {
		l.lost(client, sys.ECONNRESET)
		return
	}
	if e.state&failed != 0 {
		l.came(endpoint)
		l.broken(endpoint, sys.ECONNRESET)
		return
	}
	if c.held != nil || c.state&(readable|ending) != 0 {
		l.run(client)
	}
	if l.facts&running != 0 && e.state&readable != 0 {
		l.run(endpoint)
	}
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
		l.closed(i) // Probe found that
	}
	l.note(i, from.Ready)
}

// note remembers what an event said about reading from side i.
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

// closed notes that side i has sent its FIN.
func (l *Link) closed(i int) {
	if l.facts&closing == 0 {
		l.facts |= closing
		if i == endpoint {
			l.facts |= endpointFirst
		}
	}
}

// Watch is what an endpoint's socket is registered for while it connects, so that
// Start can take the registration over as it is.
const Watch = watchRead | poll.Writable

const watchRead = poll.Readable | poll.PeerDone | poll.Urgent | poll.Edge

// watch registers a side with the loop, for as long as it is open. Writable is
// asked for only once it is needed: an epoll_ctl for the few that are ever
// blocked is cheaper than an event for each new connection, which is always
// writable.
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

// await makes sure that a side reports when it is writable again.
func (l *Link) await(i int) {
	s, w := &l.sides[i], l.worker
	if s.state&watchesOut != 0 || !s.reg.Valid() {
		return // not registered: Start is about to
	}
	s.state |= watchesOut
	w.stats.Controls++
	if err := w.loop.Modify(s.reg, Watch); err != nil {
		l.finish(Limit)
	}
}

// HandleEvents is called by the loop.
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

// Abort ends a link at once: both sides are reset. Ending a link that is not
// running does nothing.
func (w *Worker) Abort(l *Link, end End) {
	if l.facts&running != 0 {
		l.finish(end)
	}
}

// broken ends the link because side i was reset, or no longer answers. What it
// sent before goes to the other side as far as that takes it at once. e is why;
// 0: still to be found out.
func (l *Link) broken(i int, e sys.Errno) {
	w, s := l.worker, &l.sides[i]
	if why := l.drain(i); e == 0 {
		e = why // the error comes behind the bytes
	}
	if e == 0 {
		w.stats.Others++
		e = w.kernel.socketError(int(s.fd))
	}
	l.lost(i, e)
}

// lost is broken when there is nothing left to read.
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
// answers: ETIMEDOUT, or the error that routers told the kernel meanwhile.
func unanswered(e sys.Errno) bool {
	switch e {
	case 0, sys.ECONNRESET, sys.EPIPE, sys.ECONNABORTED, sys.ENOMEM, sys.ENOBUFS:
		return false
	}
	return true
}

// finish closes both sides and tells the owner. Unless both have sent their FIN,
// whoever is still there is reset.
func (l *Link) finish(end End) {
	w := l.worker
	inOrder := end == ClientFin || end == EndpointFin
	w.loop.Cancel(&l.timer)
	w.turns.remove(l)
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
