package relay

import "github.com/sluice-proxy/sluice/internal/sys"

// Probe tries to carry the client's first bytes over while the endpoint's
// socket is connecting, before Start. It returns 0 when the endpoint is
// connected: call Start now. EAGAIN means that it is not yet: call Probe again
// when the endpoint's descriptor is writable. Anything else is why the connect
// failed: dial again, and call Probe with the new descriptor.
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
	if d.held == nil {
		w.stats.Writes++
		_, e := w.kernel.send(endpointFD, nil, false)
		return e
	}
	w.stats.Writes++
	n, e := w.kernel.send(endpointFD, d.held.bytes(), false)
	if e != 0 {
		return e
	}
	w.delivered(d, n)
	if d.held != nil {
		d.state |= blocked
	}
	return 0
}

// prefetch reads what the client sent first.
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

// Drop gives back what Probe read, for a link that will not be started. The
// descriptors stay the caller's; the client should be reset, as what it sent
// is lost.
func (w *Worker) Drop(l *Link) {
	w.giveUp(&l.sides[client])
	l.sides[client] = side{}
}
