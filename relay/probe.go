package relay

import "github.com/sluice-proxy/sluice/internal/sys"

// Probe tries to send the client's first bytes while the endpoint's socket is
// connecting, before Start. It returns 0 if the endpoint is connected: then call
// Start. EAGAIN means that the connection is in progress: call Probe again when the
// endpoint's descriptor is writable. Any other error is the cause of the failed
// connect: dial again and call Probe with the new descriptor.
//
// An endpoint that accepted, sent bytes (such as an error message) and reset the
// connection counts as connected. Start then forwards its bytes and the reset.
//
// A connection to an endpoint on the same node is usually established when connect
// returns. A Probe at that time avoids waiting for an event. The link keeps the
// bytes that Probe read from the client until an endpoint accepts them, or until
// Drop.
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

// Prepend queues bytes, at most 64 KiB - 1, to be sent to the endpoint before the client's. Call
// it before the first Probe of a link.
func (w *Worker) Prepend(l *Link, p []byte) {
	d := &l.sides[client]
	*d = side{state: probed | readable}
	w.hold(d, p)
	l.preface = uint16(len(p))
}

// saved reads the bytes that an endpoint sent before it reset the connection. It
// returns false if there are none.
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

// prefetch reads the first bytes of a side.
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

// Holds reports whether Probe has read bytes of the client, for a link that has not started.
// It reads none while those of Prepend are not sent.
func (w *Worker) Holds(l *Link) bool { return l.preface == 0 && l.sides[client].held != nil }

// Drop releases the bytes that Probe read, for a link that will not start. The
// caller keeps the descriptors and should reset the client, because its bytes are
// lost.
func (w *Worker) Drop(l *Link) {
	w.giveUp(&l.sides[client])
	l.sides[client] = side{}
}
