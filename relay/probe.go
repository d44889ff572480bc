package relay

import "github.com/sluice-proxy/sluice/internal/sys"

// Probe tries to carry the client's first bytes over while the endpoint's
// socket is connecting, before Start. It returns 0 when the endpoint is
// connected: call Start now. EAGAIN means that it is not yet: call Probe again
// when the endpoint's descriptor is writable. Anything else is why the connect
// failed: dial again, and call Probe with the new descriptor.
//
// An endpoint that accepted, sent something (why it is too busy, say) and reset
// the connection at once is connected: Start delivers what it sent, and the reset.
//
// The connection of an endpoint on the same node is usually established by the
// time that connect returns, so that a Probe right after it saves waiting for
// that event. What was read of the client stays in the link until an endpoint
// takes it, or Drop.
func (w *Worker) Probe(l *Link, clientFD, endpointFD int) sys.Errno {
	d := &l.sides[client]
	if d.state&probed == 0 {
		*d = side{}
	}
	if d.held == nil && d.state&(ending|failed) == 0 {
		w.prefetch(d, clientFD)
	}
	var first []byte
	if d.held != nil {
		first = d.held.bytes()
	}
	w.stats.Writes++
	n, e := w.kernel.send(endpointFD, first, false)
	if (e == sys.ECONNRESET || e == sys.EPIPE) && w.saved(&l.sides[endpoint], endpointFD) {
		return 0
	}
	if e != 0 {
		return e
	}
	if d.held != nil {
		w.delivered(d, n)
	}
	if d.held != nil {
		d.state |= blocked
	}
	return 0
}

// saved takes what an endpoint sent before it reset the connection; false if that
// is nothing.
func (w *Worker) saved(s *side, fd int) bool {
	*s = side{}
	w.prefetch(s, fd)
	if s.held == nil {
		*s = side{}
		return false
	}
	s.state |= failed
	return true
}

// prefetch reads what a side sent first.
func (w *Worker) prefetch(d *side, fd int) {
	w.stats.Reads++
	n, e := w.kernel.recv(fd, w.buffer)
	switch {
	case e == sys.EAGAIN:
		w.stats.Wasted++
	case e != 0:
		d.state |= failed | readable
	case n == 0:
		d.state |= ending
	default:
		w.hold(d, w.buffer[:n])
	}
	d.state |= probed
}

// Drop returns back what Probe read, for a link that will not be started. The
// descriptors stay the caller's; the client should be reset, as what it sent
// is lost.
func (w *Worker) Drop(l *Link) {
	w.giveUp(&l.sides[client])
	l.sides[client] = side{}
}
