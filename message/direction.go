package message

import (
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// run forwards the messages of direction i that are there: only one, unless the side was
// busy in the last rounds too. The level-triggered registration reports the others. So a
// request costs no second call that finds nothing.
func (l *Link) run(i int) {
	w, s, other := l.worker, &l.sides[i], &l.sides[1-i]
	if w.rounds-s.round > 1 {
		s.streak = 0
	} else if s.streak < busyAfter {
		s.streak++
	}
	s.round = w.rounds
	most := 1
	if s.streak == busyAfter {
		most = readShare
	}
	for bytes := 0; most > 0 && bytes < readBytes; {
		if w.full() && s.held == nil && other.state&deaf == 0 && !w.kernel.writable(int(other.fd)) {
			l.block(i) // there would be no memory to hold the message
			return
		}
		w.stats.Receives++
		n, kind, info, e := w.kernel.receive(&w.box, int(s.fd), w.buffer)
		switch {
		case e == sys.EAGAIN && s.failed == 0:
			s.streak = 0
			return
		case e == sys.EAGAIN:
			l.broken(i, sys.Errno(s.failed))
			return
		case e != 0:
			l.broken(i, e)
			return
		case kind == sys.SCTPMessage && n == 0:
			l.peerShutDown(i)
			return
		case kind == sys.SCTPMessage:
			most--
			bytes += n
			l.take(i, w.buffer[:n], info, false)
		case kind == sys.SCTPPart:
			l.take(i, w.buffer[:n], info, true)
		default:
			l.notice(i, kind)
		}
		if l.facts&running == 0 || s.state&(blocked|ended) != 0 {
			return
		}
	}
}

// notice acts on a notification of side i.
func (l *Link) notice(i int, kind sys.Received) {
	switch kind {
	case sys.SCTPShutDown:
		if l.sides[i].state&shut != 0 {
			l.finish(l.end)
		}
	case sys.SCTPRestarted:
		l.broken(i, sys.ECONNRESET)
	case sys.SCTPPartLost:
		l.letGo(i)
	case sys.SCTPMessage, sys.SCTPPart, sys.SCTPUp, sys.SCTPLost, sys.SCTPOtherNotice:
		// The error of a lost association follows.
	}
}

// take takes a message, or a part of one, of direction i.
func (l *Link) take(i int, p []byte, info sys.MessageInfo, part bool) {
	w, s := l.worker, &l.sides[i]
	if len(s.held)+len(p) > w.config.MaxMessage {
		if l.facts&draining == 0 && l.sides[1-i].state&deaf == 0 {
			l.unfit(i, TooLarge)
			return
		}
		l.letGo(i)
		return
	}
	if s.state&partial == 0 && !part {
		l.deliver(i, p, info)
		return
	}
	if s.state&partial == 0 {
		// Counted whole from its first part on, so that what has begun can end.
		if w.full() {
			l.finish(Limit)
			return
		}
		s.state |= partial
		s.info = info
		s.held = w.take(min(4*len(p), w.config.MaxMessage))
		s.reserved = w.config.MaxMessage
		w.reserve(s.reserved)
	}
	s.held = append(s.held, p...)
	if !part {
		s.state &^= partial
		l.deliver(i, s.held, s.info)
	}
}

// deliver sends a whole message of direction i, or holds it until there is room.
func (l *Link) deliver(i int, p []byte, info sys.MessageInfo) {
	w, s, other := l.worker, &l.sides[i], &l.sides[1-i]
	if other.state&deaf != 0 {
		l.letGo(i) // SCTP has no half-close
		return
	}
	if info.Stream >= other.streams {
		l.unfit(i, NoStream)
		return
	}
	w.stats.Sends++
	switch e := w.kernel.send(&w.box, int(other.fd), p, info); e {
	case 0:
		s.messages++
		s.bytes += uint64(len(p))
		w.stats.Messages++
		w.stats.Bytes += uint64(len(p))
		if i == endpoint && l.first == 0 {
			l.first = max(w.loop.Now(), 1)
		}
		l.letGo(i)
	case sys.EAGAIN, sys.ENOBUFS, sys.ENOMEM:
		w.stats.Blocked++
		if s.held == nil {
			s.held = append(w.take(len(p)), p...)
			s.reserved = len(p)
			w.reserve(s.reserved)
		}
		s.info = info
		l.block(i)
	case sys.EMSGSIZE:
		l.unfit(i, TooLarge)
	case sys.EINVAL:
		l.unfit(i, NoStream)
	default:
		// The other side's shutdown has come and is read next, or the notice of its error.
		other.state |= deaf
		l.letGo(i)
		if e == sys.EPIPE || other.state&ended != 0 {
			return
		}
		other.failed = uint8(e)
		if other.state&blocked != 0 {
			l.failsBlocked(1 - i)
		}
	}
}

// block stops reading direction i until the other side has room.
func (l *Link) block(i int) {
	l.sides[i].state |= blocked
	l.watch(i)
	if l.facts&running != 0 {
		l.watch(1 - i)
	}
}

// unblock goes on with direction i: the other side has room.
func (l *Link) unblock(i int) {
	s := &l.sides[i]
	s.state &^= blocked
	if s.held != nil {
		l.deliver(i, s.held, s.info)
		if l.facts&running != 0 && s.state&blocked != 0 {
			l.starve(i)
		}
		if l.facts&running == 0 || s.state&blocked != 0 {
			return
		}
	}
	l.watch(1 - i)
	switch {
	case l.facts&running == 0:
	case l.facts&draining != 0:
		l.drained()
	case s.state&ended != 0:
		l.shutOther(i)
	default:
		if s.state&deaf != 0 { // it failed while it was blocked
			l.run(i)
			if l.facts&(running|draining) == running && s.state&(ended|blocked) == 0 {
				l.watch(i)
			}
			return
		}
		l.watch(i)
	}
}

// letGo forgets what direction i holds.
func (l *Link) letGo(i int) {
	s, w := &l.sides[i], l.worker
	s.state &^= partial
	if s.held == nil {
		return
	}
	w.put(s.held)
	w.reserve(-s.reserved)
	s.held, s.reserved = nil, 0
}

// peerShutDown continues the shutdown that the peer of side i has begun.
func (l *Link) peerShutDown(i int) {
	s := &l.sides[i]
	if s.state&shut != 0 { // both sides at once
		l.finish(l.end)
		return
	}
	s.state |= ended | deaf
	if l.facts&closing == 0 {
		l.facts |= closing
		l.end = ClientShutdown
		if i == endpoint {
			l.end = EndpointShutdown
		}
	}
	// What the other side still sends has no receiver any more.
	if o := &l.sides[1-i]; o.state&blocked != 0 {
		l.letGo(1 - i)
		o.state &^= blocked
		l.watch(1 - i)
	}
	if l.facts&running != 0 {
		l.watch(i)
	}
	if l.facts&running != 0 && s.state&blocked == 0 {
		l.shutOther(i)
	}
}

// shutOther shuts the other side down: all of direction i is delivered to its kernel.
func (l *Link) shutOther(i int) {
	o := &l.sides[1-i]
	if o.state&ended != 0 || l.worker.kernel.shutdown(int(o.fd)) != 0 {
		l.finish(l.end)
		return
	}
	o.state |= shut | deaf
	l.moved = l.worker.loop.Now()
	l.setTimer()
}

// broken ends the link because side i aborted or no longer answers.
func (l *Link) broken(i int, e sys.Errno) {
	s := &l.sides[i]
	// After a shutdown, ENOTCONN says that it is complete. Any other error means that
	// this side may not have got all that was sent before.
	if l.facts&closing == 0 || e != sys.ENOTCONN {
		l.end = endOf(i, e)
	}
	if l.facts&closing != 0 && s.state&shut != 0 {
		l.finish(l.end)
		return
	}
	if s.state&partial != 0 {
		l.letGo(i)
	}
	l.drain(i)
}

// unfit ends the link because the other side cannot take a message of side i.
func (l *Link) unfit(i int, end End) {
	if l.facts&(closing|draining) == 0 {
		l.end = end
	}
	l.letGo(i)
	l.drain(i)
}

// drain reads no more. The other side gets what was received from side i before, for a
// while.
func (l *Link) drain(i int) {
	s, o := &l.sides[i], &l.sides[1-i]
	l.letGo(1 - i)
	s.state |= ended | deaf
	o.state |= ended // what it sends has no receiver
	o.state &^= blocked
	l.facts |= draining
	if l.until == 0 {
		l.until = l.worker.loop.Now() + int64(l.worker.config.DrainTimeout)
	}
	l.watch(i)
	if l.facts&running != 0 {
		l.watch(1 - i)
	}
	if l.facts&running != 0 {
		l.drained()
	}
}

// drained ends a draining link once the other side has all, or the time is over.
func (l *Link) drained() {
	w, now := l.worker, l.worker.loop.Now()
	i := endpoint // the side that takes what was received
	if l.sides[endpoint].state&deaf != 0 {
		i = client
	}
	waits := l.sides[1-i].held != nil || w.kernel.unsent(int(l.sides[i].fd)) > 0
	if !waits || now >= l.until || l.sides[i].state&deaf != 0 {
		l.finish(l.end)
		return
	}
	l.pause = min(max(2*l.pause, int64(lookPause)), int64(50*lookPause))
	w.loop.Schedule(&l.timer, min(now+l.pause, l.until), l)
}

// timedOut ends a link whose side failed while the other one had no room.
func (l *Link) timedOut() {
	for i := range l.sides {
		if l.sides[i].state&deaf != 0 {
			l.finish(endOf(i, sys.ECONNRESET))
			return
		}
	}
	l.finish(Limit)
}

// endOf returns the end of a link whose side i failed with an error.
func endOf(i int, e sys.Errno) End {
	end := ClientAbort
	if i == endpoint {
		end = EndpointAbort
	}
	switch e {
	case sys.ECONNRESET, sys.EPIPE, sys.ECONNABORTED:
		return end
	case sys.ENOMEM, sys.ENOBUFS:
		return Limit
	}
	return end + 1 // ClientLost, EndpointLost
}

// finish closes both sides and calls the owner. Unless both are shut down, it aborts
// the remaining peers.
func (l *Link) finish(end End) {
	w := l.worker
	inOrder := (end == ClientShutdown || end == EndpointShutdown) && l.facts&draining == 0
	w.loop.Cancel(&l.timer)
	for i := range l.sides {
		s := &l.sides[i]
		l.letGo(i)
		if s.reg.Valid() {
			w.loop.Forget(s.reg)
			s.reg = poll.Registration{}
		}
		if inOrder {
			w.kernel.closeInOrder(int(s.fd))
		} else {
			w.kernel.close(int(s.fd))
		}
		s.fd, s.state = -1, 0
	}
	w.stats.Open--
	l.facts = 0
	owner := l.owner
	l.owner = nil
	owner.LinkEnded(end)
}
