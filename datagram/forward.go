package datagram

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// deliver forwards the first n datagrams that were received from clients.
func (w *worker) deliver(l *listener, n int) {
	var (
		at  key
		cur *session
		now = w.loop.Now()
	)
	for i := range n {
		if w.upIn.Cut(i) {
			w.server.stats.Lost.Add(1)
			continue
		}
		to, segment, class, ttl := w.upIn.Details(i)
		if l.replySocket != nil {
			to = l.replySocket.address
		}
		if k := (key{w.upIn.From(i), to}); k != at {
			w.flushUp(cur)
			at, cur = k, w.find(l.replySocket, k)
		}
		if cur == nil {
			continue
		}
		if class != cur.outClass {
			w.flushUp(cur)
			if cur = w.find(l.replySocket, at); cur == nil {
				continue
			}
			cur.outClass = class
		}
		cur.slot = l.slot
		l.limitTTL(cur, ttl)
		p := w.upIn.Data(i)
		if w.up.Empty() {
			w.upAfter = cur.unacked.count()
		}
		if cur.class == unanswered || cur.doubted {
			w.unacked.keep(cur, p, segment)
		}
		w.up.Append(netip.AddrPort{}, p, segment, !cur.socket.noGSO)
		cur.record.BytesFromClient += uint64(len(p))
		cur.record.DatagramsFromClient += datagramsOf(len(p), segment)
		cur.sessions.touch(cur, now, false)
	}
	w.flushUp(cur)
}

// datagramsOf returns the number of datagrams in a GSO batch.
func datagramsOf(bytes, segment int) uint64 {
	if segment <= 0 || bytes <= segment {
		return 1
	}
	return uint64((bytes + segment - 1) / segment)
}

// flushUp sends a session's pending datagrams to its endpoint. If the session ends
// and another one replaces it, that one gets all of them.
func (w *worker) flushUp(c *session) {
	var r retries
	for !w.up.Empty() {
		c.setHeader()
		errno := w.up.Send(int(c.socket.fd))
		if errno == 0 {
			continue
		}
		closed, read := c.readErrors()
		switch {
		case closed:
			if c = c.failOver(w.upAfter); c == nil {
				w.up.Reset()
				return
			}
			w.up.Rewind()
		case r.allow(read):
		default:
			w.sendFailed(w.up, int(c.socket.fd), errno, &c.socket.noGSO)
		}
	}
}

// retries bounds how often datagrams are sent again after errors that concern earlier
// ones: the kernel returns such an error instead of sending.
type retries struct {
	n    int
	bare bool // the last error had no message
}

// allow reports whether to send again after an error. read is how many messages waited. It
// is 0 for an error of the call itself, which is the same if the datagram is sent again.
// But it may also be 0 for an earlier datagram: the kernel first queues the message, which
// the loop may read at once, and then sets the error, also if the queue had no room.
func (r *retries) allow(read int) bool {
	if read == 0 {
		first := !r.bare
		r.bare = true
		return first
	}
	r.n++
	r.bare = false
	return r.n <= mostTries
}

// mostTries is how often datagrams are sent again after errors with messages: each try
// reads errorShare of the messages that wait, and a socket's buffer, which the kernel
// doubles, has room for one of each 768 bytes.
const mostTries = 2 * socketBuffer / 768 / errorShare

// sendFailed handles an error of the first pending message: it sends the datagrams
// one by one, or drops them.
func (w *worker) sendFailed(out *sys.Outbox, fd int, errno sys.Errno, noGSO *bool) {
	var lost int
	switch {
	case out.IsGSO() && (errno == sys.EIO || errno == sys.EINVAL || errno == sys.EMSGSIZE):
		// The device does not support GSO, or the datagrams do not fit into its
		// packets.
		*noGSO = *noGSO || errno == sys.EIO
		lost, _ = out.Split(fd)
	default:
		lost = out.Skip()
	}
	if lost > 0 {
		w.server.stats.Lost.Add(uint64(lost))
	}
}

// receive receives the datagrams of a session's endpoint.
func (c *session) receive() {
	w := c.sessions.worker
	if w.downSocket != c.replySocket || w.downUsed+int(c.batch) > w.downIn.Slots() {
		w.flushDown()
		w.downSocket = c.replySocket
		w.down.SetSource(c.replySocket.source)
	}
	first := w.downUsed
	got, errno := c.socket.receive(c, w, first)
	if errno != 0 {
		return // another event reports an error
	}
	w.downUsed += got
	if c.class == unanswered {
		c.record.FirstByte = max(poll.Nanotime()-c.record.Start, 1)
	}
	c.doubted = false
	w.unacked.drop(c)
	c.sessions.touch(c, w.loop.Now(), true)
	limit := uint64(c.sessions.service.terms.Load().responses)
	for i := first; i < first+got; i++ {
		if w.downIn.Cut(i) {
			w.server.stats.Lost.Add(1)
			continue
		}
		_, segment, _, _ := w.downIn.Details(i)
		p := w.downIn.Data(i)
		w.answer(c, p, segment)
		c.record.BytesFromEndpoint += uint64(len(p))
		c.record.DatagramsFromEndpoint += datagramsOf(len(p), segment)
		if limit != 0 && c.record.DatagramsFromEndpoint >= limit {
			c.end(conntrack.Responses)
			return
		}
	}
}

// answer queues an endpoint's datagram, or GRO batch, for the client.
func (w *worker) answer(c *session, p []byte, segment int) {
	o := c.replySocket
	if !o.raw {
		w.down.Append(c.record.Client, p, segment, !o.noGSO)
		return
	}
	if segment == 0 {
		segment = max(len(p), 1)
	}
	for {
		if w.down.Full() {
			w.sendDown()
		}
		n := min(segment, len(p))
		w.down.AppendRaw(o.address, c.record.Client, p[:n])
		if p = p[n:]; len(p) == 0 {
			return
		}
	}
}

// flushDown sends the queued replies, at the latest at the end of each round of the
// loop.
func (w *worker) flushDown() {
	w.sendDown()
	w.downUsed = 0
}

// sendDown sends the queued replies. The slots that hold them remain in use.
func (w *worker) sendDown() {
	o := w.downSocket
	for !w.down.Empty() {
		if errno := w.down.Send(o.fd); errno != 0 {
			w.sendFailed(w.down, o.fd, errno, &o.noGSO)
		}
	}
}
