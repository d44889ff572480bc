package relay

import (
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// A direction starts with small socket buffers, so that a reader that stops reading
// holds little kernel memory. A direction that delivers many bytes gets large
// buffers. The kernel never discards received bytes, or written bytes that the peer
// has not read. So a fast reader that stops reading holds all of its buffers, and
// Config.MaxBulk bounds how many directions have large ones at the same time. The
// others keep small buffers. A direction returns to small buffers when the link
// ends, or when a check finds that it delivered little since the last check and has
// no bytes in the kernel.

const (
	// measureAfter is how many bytes a direction delivers before the relay measures
	// the round trip to its source. With a round trip of farAway or more, a receive
	// buffer of fixed size allows less than 4 Gbit/s, so the kernel must tune it.
	measureAfter = 1 << 20
	farAway      = 500 * time.Microsecond
	// widenAfter is how many bytes a direction delivers, since the last check,
	// before it gets buffers of bulkBuffer, which cost less CPU time per byte. For
	// a far source, measureAfter suffices.
	widenAfter = 4 << 20
	bulkBuffer = 2 << 20
	// nearPlaces and farPlaces are what a direction counts against Config.MaxBulk,
	// in units of 4 MiB. The kernel's own tuning goes to 6 MiB by default.
	nearPlaces = 1
	farPlaces  = 2
)

// Bulk returns how much of Config.MaxBulk is in use, and how often a direction kept
// its small buffers because it was exhausted. It is safe for concurrent use.
func (r *Relay) Bulk() (places int, refused uint64) {
	return int(r.bulk.Load()), r.refused.Load()
}

// takeBulk reserves n units of Config.MaxBulk. It returns false if they are not
// available.
func (r *Relay) takeBulk(n int64) bool {
	if reserve(&r.bulk, n, int64(r.config.MaxBulk)) {
		return true
	}
	r.refused.Add(1)
	return false
}

// places returns what a direction counts against Config.MaxBulk.
func (s *side) places() int64 {
	if s.state&far != 0 {
		return farPlaces
	}
	return nearPlaces
}

// kib returns how much a direction has delivered in KiB, modulo 4 TiB.
func (s *side) kib() uint32 { return uint32(s.bytes >> 10) }

// lately returns how many KiB a direction has delivered since its mark. Subtraction
// survives wrap-around.
func (s *side) lately() uint32 { return s.kib() - s.mark }

// widen gives large buffers to a direction that has delivered many bytes, if
// Config.MaxBulk allows it.
func (l *Link) widen(i int) {
	w, s := l.worker, &l.sides[i]
	if s.state&measured == 0 {
		s.state |= measured
		w.stats.Others++
		if d, e := w.kernel.delivery(int(s.fd)); e == 0 && d.RTT >= farAway {
			s.state |= far
		}
	}
	if s.state&far == 0 && s.lately() < widenAfter>>10 {
		return
	}
	if !w.relay.takeBulk(s.places()) {
		s.mark = s.kib() // try again after the same number of bytes
		return
	}
	s.state |= widened
	w.stats.Others += 3
	w.kernel.limitUnsent(int(l.sides[1-i].fd), bulkBuffer)
	if s.state&far != 0 {
		w.kernel.freeReceiveBuffer(int(s.fd))
	} else {
		w.kernel.growReceiveBuffer(int(s.fd), bulkBuffer)
	}
}

// review restores small buffers if a direction delivered little since the last
// check and has no bytes in the kernel. unsent means that the destination has
// unacknowledged bytes. review reports whether the direction has large buffers.
func (l *Link) review(i int, unsent bool) (wide bool) {
	w, s := l.worker, &l.sides[i]
	busy := s.lately() >= widenAfter>>10
	s.mark = s.kib()
	if s.state&widened == 0 {
		return false
	}
	if busy || unsent || s.held != nil || s.inPipe > 0 || s.state&(readable|blocked) != 0 {
		return true
	}
	s.endBulk(w.relay)
	w.stats.Others += 3
	w.kernel.limitUnsent(int(l.sides[1-i].fd), sys.UnsentLimit)
	w.kernel.growReceiveBuffer(int(s.fd), sys.ReceiveBuffer)
	return false
}

// endBulk returns a direction's units of Config.MaxBulk.
func (s *side) endBulk(r *Relay) {
	if s.state&widened != 0 {
		s.state &^= widened
		r.bulk.Add(-s.places())
	}
}
