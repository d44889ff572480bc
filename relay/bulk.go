package relay

import (
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// A direction begins with small socket buffers, so that a reader that stops pins little
// of the kernel's memory. One that delivers much gets large ones. What has been received,
// or written and not delivered, cannot be taken back from the kernel: a reader that was
// fast and stops pins all of it. So Config.MaxBulk bounds how many directions have large
// buffers at once; the others keep small ones. The place is given back when the link
// ends, or when a look finds that the direction delivered little since the last one and
// that nothing of it is in the kernel: then its buffers become small again.

const (
	// measureAfter is how many bytes a direction delivers before it is looked at
	// whether its source is far away, so that the receive buffer has to grow for
	// its rate: a round trip of farAway or more allows less than 4 Gbit/s.
	measureAfter = 1 << 20
	farAway      = 500 * time.Microsecond
	// widenAfter is how many bytes a direction delivers, since the last look, before
	// it has buffers of bulkBuffer, which cost less CPU time for each byte. If its
	// source is far away, measureAfter is enough.
	widenAfter = 4 << 20
	bulkBuffer = 2 << 20
	// nearPlaces and farPlaces are how many of Config.MaxBulk a direction takes: 4 MiB
	// each. The kernel's own tuning goes to 6 MiB by default.
	nearPlaces = 1
	farPlaces  = 2
)

// Bulk returns how many of Config.MaxBulk are in use, and how often a direction kept
// its small buffers for want of them. It may be called from any goroutine.
func (r *Relay) Bulk() (places int, refused uint64) {
	return int(r.bulk.Load()), r.refused.Load()
}

// takeBulk takes places of Config.MaxBulk; false if there are not so many.
func (r *Relay) takeBulk(n int64) bool {
	if r.bulk.Add(n) <= int64(r.config.MaxBulk) {
		return true
	}
	r.bulk.Add(-n)
	r.refused.Add(1)
	return false
}

// places is how many of Config.MaxBulk a direction takes.
func (s *side) places() int64 {
	if s.state&far != 0 {
		return farPlaces
	}
	return nearPlaces
}

// kib is how much a direction has delivered in KiB, modulo 4 TiB.
func (s *side) kib() uint32 { return uint32(s.bytes >> 10) }

// lately is how many KiB a direction has delivered since its mark. The subtraction
// survives wrap-around.
func (s *side) lately() uint32 { return s.kib() - s.mark }

// widen gives a direction that delivers much larger buffers, if there is a place for
// it. The client's socket has small ones by its listener, the endpoint's gets them here.
func (l *Link) widen(i int) {
	w, s := l.worker, &l.sides[i]
	if i == endpoint && l.facts&bounded == 0 {
		l.facts |= bounded
		w.stats.Others += 2
		w.kernel.growReceiveBuffer(int(s.fd), sys.ReceiveBuffer)
	}
	if s.lately() < measureAfter>>10 {
		return
	}
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
		s.mark = s.kib() // tried again after as much again
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

// review gives a direction small buffers again if it delivered little since the last
// look and nothing of it is in the kernel. unsent tells whether the destination has
// something that is not acknowledged. It reports whether the direction has large
// buffers.
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

// endBulk gives a direction's places back.
func (s *side) endBulk(r *Relay) {
	if s.state&widened != 0 {
		s.state &^= widened
		r.bulk.Add(-s.places())
	}
}
