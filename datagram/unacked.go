package datagram

import (
	"bytes"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// The copies of one session.
	unackedDatagrams = 8
	unackedBytes     = 64 << 10
	unackedTime      = time.Second
	// unackedTotal bounds what one loop keeps, in bytes.
	unackedTotal = 8 << 20
)

// unackedSizes are the sizes of buffers for copies.
var unackedSizes = [...]int{1 << 10, 8 << 10, unackedBytes}

// spareUnacked is how many buffers of each size are kept for reuse.
var spareUnacked = [len(unackedSizes)]int{256, 32, 8}

// unacked holds copies of the first datagrams of a session, until its endpoint has
// answered.
type unacked struct {
	session    *session
	next, prev *unacked // in the order of since
	since      int64
	data       []byte // of one of unackedSizes
	ends       [unackedDatagrams]int32
	n          int
	size       uint8 // index of unackedSizes
}

// keeper holds the copies of a loop's sessions.
type keeper struct {
	loop       *poll.Loop
	head, tail *unacked
	total      int // bytes
	spare      [len(unackedSizes)][]*unacked
	timer      poll.Timer
}

// keep copies datagrams of a session within the bounds. It never replaces earlier
// copies. p is a GSO batch if segment is not 0.
func (h *keeper) keep(s *session, p []byte, segment int) {
	if segment == 0 {
		h.keepOne(s, p)
		return
	}
	for len(p) > 0 {
		n := min(segment, len(p))
		if !h.keepOne(s, p[:n]) {
			return
		}
		p = p[n:]
	}
}

func (h *keeper) keepOne(s *session, p []byte) bool {
	k := s.unacked
	used := 0
	if k != nil {
		used = k.used()
	}
	if k != nil && k.n == unackedDatagrams || used+len(p) > unackedBytes {
		return false
	}
	if k == nil || used+len(p) > len(k.data) {
		k = h.grow(s, used+len(p))
	}
	copy(k.data[used:], p)
	k.ends[k.n] = int32(used + len(p))
	k.n++
	return true
}

// used returns the number of bytes in use.
func (k *unacked) used() int {
	if k.n == 0 {
		return 0
	}
	return int(k.ends[k.n-1])
}

// datagram returns the i-th copy.
func (k *unacked) datagram(i int) []byte {
	from := int32(0)
	if i > 0 {
		from = k.ends[i-1]
	}
	return k.data[from:k.ends[i]]
}

// grow gives a session a buffer for so many bytes and moves its copies there.
func (h *keeper) grow(s *session, bytes int) *unacked {
	size := 0
	for unackedSizes[size] < bytes {
		size++
	}
	for h.total+unackedSizes[size] > unackedTotal {
		first := h.head
		if first != nil && first.session == s {
			first = first.next
		}
		if first == nil {
			break
		}
		h.drop(first.session)
	}
	k := h.get(size)
	if old := s.unacked; old != nil { // it keeps its place, and takes the larger buffer
		copy(k.data, old.data[:old.used()])
		old.data, k.data = k.data, old.data
		old.size, k.size = k.size, old.size
		h.put(k)
		return old
	}
	k.session, k.since, s.unacked = s, h.loop.Now(), k
	h.append(k)
	if !h.timer.Scheduled() {
		h.loop.Schedule(&h.timer, h.head.since+int64(unackedTime), h)
	}
	return k
}

func (h *keeper) get(size int) *unacked {
	h.total += unackedSizes[size]
	list := h.spare[size]
	if n := len(list); n > 0 {
		k := list[n-1]
		h.spare[size] = list[:n-1]
		return k
	}
	return &unacked{data: make([]byte, unackedSizes[size]), size: uint8(size)}
}

func (h *keeper) put(k *unacked) {
	h.total -= unackedSizes[k.size]
	if len(h.spare[k.size]) < spareUnacked[k.size] {
		*k = unacked{data: k.data, size: k.size}
		h.spare[k.size] = append(h.spare[k.size], k)
	}
}

func (h *keeper) append(k *unacked) {
	k.prev = h.tail
	if h.tail != nil {
		h.tail.next = k
	} else {
		h.head = k
	}
	h.tail = k
}

// drop discards the copies of a session.
func (h *keeper) drop(s *session) {
	if s.unacked != nil {
		h.remove(s.unacked)
		s.unacked = nil
	}
}

// remove removes k from the list and frees its buffer.
func (h *keeper) remove(k *unacked) {
	if k.prev != nil {
		k.prev.next = k.next
	} else {
		h.head = k.next
	}
	if k.next != nil {
		k.next.prev = k.prev
	} else {
		h.tail = k.prev
	}
	h.put(k)
}

// HandleTimer discards expired copies.
func (h *keeper) HandleTimer(*poll.Timer) {
	for h.head != nil && h.head.since+int64(unackedTime) <= h.loop.Now() {
		h.drop(h.head.session)
	}
	if h.head != nil {
		h.loop.Schedule(&h.timer, h.head.since+int64(unackedTime), h)
	}
}

// quotes reports whether a quote is the beginning of one of the copies. Then its
// sender has seen that datagram.
func (k *unacked) quotes(quote []byte) bool {
	if k == nil {
		return false
	}
	for i := range k.n {
		d := k.datagram(i)
		n := min(len(quote), len(d))
		if n >= min(len(d), leastQuote) && bytes.Equal(d[:n], quote[:n]) {
			return true
		}
	}
	return false
}

// leastQuote is how many bytes of a quote an attacker cannot guess.
const leastQuote = 8

// count returns the number of copies.
func (k *unacked) count() int {
	if k == nil {
		return 0
	}
	return k.n
}

// resend sends the first n copies of a session. It returns false if the endpoint
// refused meanwhile.
func (w *worker) resend(s *session, n int) bool {
	s.setHeader()
	var r retries
	for i := 0; i < min(n, s.unacked.count()); {
		_, errno := sys.Send(int(s.socket.fd), s.unacked.datagram(i), false)
		if errno == 0 {
			w.server.stats.Resent.Add(1)
			i++
			continue
		}
		closed, read := s.readErrors()
		if closed {
			return false
		}
		if !r.allow(read) {
			w.server.stats.Lost.Add(1)
			i++
		}
	}
	return true
}
