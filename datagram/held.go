package datagram

import (
	"bytes"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// What is kept of a session until its endpoint has answered.
	heldDatagrams = 8
	heldBytes     = 64 << 10
	heldTime      = time.Second
	// heldTotal bounds what one loop keeps, in bytes.
	heldTotal = 8 << 20
)

// heldSizes are the sizes of memory that datagrams are kept in.
var heldSizes = [...]int{1 << 10, 8 << 10, heldBytes}

// spareHeld is how much memory of each size is kept to be used again.
var spareHeld = [len(heldSizes)]int{256, 32, 8}

// held are copies of the first datagrams of a session, until its endpoint has
// answered.
type held struct {
	session    *session
	next, prev *held // in the order of since
	since      int64
	data       []byte // of one of heldSizes
	ends       [heldDatagrams]int32
	n          int
	size       uint8 // index of heldSizes
}

// holder keeps a loop's held datagrams.
type holder struct {
	loop       *poll.Loop
	head, tail *held
	total      int // bytes
	spare      [len(heldSizes)][]*held
	timer      poll.Timer
}

// keep copies datagrams of a session, as long as bounds allow; what is kept
// already stays. p is a train if segment is not 0.
func (h *holder) keep(s *session, p []byte, segment int) {
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

func (h *holder) keepOne(s *session, p []byte) bool {
	k := s.held
	used := 0
	if k != nil {
		used = k.used()
	}
	if k != nil && k.n == heldDatagrams || used+len(p) > heldBytes {
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

// used gives the number of bytes that are kept.
func (k *held) used() int {
	if k.n == 0 {
		return 0
	}
	return int(k.ends[k.n-1])
}

// datagram gives one of those that are kept.
func (k *held) datagram(i int) []byte {
	from := int32(0)
	if i > 0 {
		from = k.ends[i-1]
	}
	return k.data[from:k.ends[i]]
}

// grow gives a session memory for so many bytes, with what it keeps already.
func (h *holder) grow(s *session, bytes int) *held {
	size := 0
	for heldSizes[size] < bytes {
		size++
	}
	for h.total+heldSizes[size] > heldTotal {
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
	k.session, k.since = s, h.loop.Now()
	if old := s.held; old != nil {
		k.since, k.n, k.ends = old.since, old.n, old.ends
		copy(k.data, old.data[:old.used()])
		h.replace(old, k)
	} else {
		h.append(k)
	}
	s.held = k
	if !h.timer.Scheduled() {
		h.loop.Schedule(&h.timer, h.head.since+int64(heldTime), h)
	}
	return k
}

func (h *holder) get(size int) *held {
	h.total += heldSizes[size]
	list := h.spare[size]
	if n := len(list); n > 0 {
		k := list[n-1]
		h.spare[size] = list[:n-1]
		return k
	}
	return &held{data: make([]byte, heldSizes[size]), size: uint8(size)}
}

func (h *holder) put(k *held) {
	h.total -= heldSizes[k.size]
	if len(h.spare[k.size]) < spareHeld[k.size] {
		*k = held{data: k.data, size: k.size}
		h.spare[k.size] = append(h.spare[k.size], k)
	}
}

func (h *holder) append(k *held) {
	k.prev = h.tail
	if h.tail != nil {
		h.tail.next = k
	} else {
		h.head = k
	}
	h.tail = k
}

// replace puts to where from was in the order.
func (h *holder) replace(from, to *held) {
	to.prev, to.next = from.prev, from.next
	if to.prev != nil {
		to.prev.next = to
	} else {
		h.head = to
	}
	if to.next != nil {
		to.next.prev = to
	} else {
		h.tail = to
	}
	h.put(from)
}

// drop forgets what is kept of a session.
func (h *holder) drop(s *session) {
	if s.held != nil {
		h.remove(s.held)
		s.held = nil
	}
}

// remove takes k out and gives its memory back.
func (h *holder) remove(k *held) {
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

// HandleTimer drops what was kept long enough.
func (h *holder) HandleTimer(*poll.Timer) {
	for h.head != nil && h.head.since+int64(heldTime) <= h.loop.Now() {
		h.drop(h.head.session)
	}
	if h.head != nil {
		h.loop.Schedule(&h.timer, h.head.since+int64(heldTime), h)
	}
}

// quotes tells whether a quote begins one of the datagrams that are kept: who
// quotes it has seen it.
func (k *held) quotes(quote []byte) bool {
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

// leastQuote is how many bytes of a datagram nobody guesses.
const leastQuote = 8

// count gives the number of datagrams that are kept.
func (k *held) count() int {
	if k == nil {
		return 0
	}
	return k.n
}

// resend sends the first n of what is kept of a session. It is false if the
// endpoint refused meanwhile.
func (w *worker) resend(s *session, n int) bool {
	s.setHeader()
	for i := range min(n, s.held.count()) {
		_, errno := sys.Send(int(s.socket.fd), s.held.datagram(i), false)
		if errno != 0 {
			if closed, _ := s.readErrors(); closed {
				return false
			}
			_, errno = sys.Send(int(s.socket.fd), s.held.datagram(i), false)
		}
		if errno == 0 {
			w.server.stats.resent.Add(1)
		} else {
			w.server.stats.lost.Add(1)
		}
	}
	return true
}
