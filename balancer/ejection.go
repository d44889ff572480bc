package balancer

import (
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// Ejection keeps new connections off an endpoint that keeps failing: it is ejected for a
// while after some failures in a row. A failure is an attempt that the endpoint refuses or
// does not answer, or a connection that it resets before its first byte. The zero value
// ejects nothing.
type Ejection struct {
	// After is the number of failures in a row; 0 = never.
	After int
	// AnyReset makes each reset by the endpoint a failure.
	AnyReset bool
}

const (
	firstEjection   = 10 * time.Second
	longestEjection = 5 * time.Minute
	mostDoubled     = 10
)

// parseEjection reads "5" or "5 any-reset".
func parseEjection(value string) (e Ejection, err error) {
	var rest string
	if _, err = fmt.Sscan(value, &rest); err == nil {
		e.After, err = strconv.Atoi(rest)
	}
	switch tail := value[min(len(rest), len(value)):]; {
	case err != nil || e.After < 1 || e.After > 1000:
	case tail == "":
		return e, nil
	case tail == " any-reset":
		e.AnyReset = true
		return e, nil
	}
	return Ejection{}, fmt.Errorf("%s %q: not a number of failures from 1 to 1000, with \" any-reset\" behind it or without", ejectAnnotation, value)
}

// outcomes are what an endpoint did lately. Guarded by ejections.mu, except until.
type outcomes struct {
	until    atomic.Int64 // monotonic ns: ejected until then, or being tried; 0 = not ejected
	trying   bool         // a connection tries it: until is when it counts as mended
	attempts bool         // failed attempts ejected it, and not resets
	refused  int          // attempts that failed in a row
	resets   int          // connections that it reset in a row
	doubled  int          // of the next ejection's time
}

// ejections are those of the endpoints of a service port.
type ejections struct {
	settings atomic.Pointer[Ejection] // nil: none
	out      atomic.Int32             // ejected endpoints

	mu     sync.Mutex
	listed map[uint64]bool // keys of the service port's endpoints; guarded by mu
}

// roomLocked reports whether another endpoint may be ejected: at most half of them may.
func (x *ejections) roomLocked() bool { return 2*(int(x.out.Load())+1) <= len(x.listed) }

// Outcome is how a connection ended, as far as it says something about the endpoint.
type Outcome uint8

// The outcomes.
const (
	Served   Outcome = iota // the endpoint served it, or ended it in order
	Reset                   // the endpoint reset it, after its first byte
	Unserved                // the endpoint reset it before its first byte
)

// Refused records an attempt that the endpoint refused or did not answer.
func (s *Loads) Refused(l *Load, now int64) { s.note(l, now, true, true) }

// Answered records how long the endpoint took to answer an attempt. Each answer counts an
// eighth of the average.
func (s *Loads) Answered(l *Load, took time.Duration, now int64) {
	us := uint32(min(max(took.Microseconds(), 1), 1<<30))
	if was := l.connect.Load(); was != 0 {
		us = uint32(int64(was) + (int64(us)-int64(was))/8)
	}
	l.connect.Store(us)
	s.note(l, now, true, false)
}

// Ended records how a connection ended that the endpoint had accepted.
func (s *Loads) Ended(l *Load, how Outcome, now int64) {
	if e := s.ejections.settings.Load(); e != nil {
		s.note(l, now, false, how == Unserved || how == Reset && e.AnyReset)
	}
}

// note counts a failure, or forgets those before. It costs nothing without ejection, and
// hardly anything while an endpoint does not fail.
func (s *Loads) note(l *Load, now int64, attempt, failed bool) {
	e := s.ejections.settings.Load()
	if e == nil {
		return
	}
	o := l.outcomes.Load()
	if o == nil {
		if !failed {
			return
		}
		l.outcomes.CompareAndSwap(nil, &outcomes{})
		o = l.outcomes.Load()
	}
	s.ejections.mu.Lock()
	defer s.ejections.mu.Unlock()
	row := &o.resets
	if attempt {
		row = &o.refused
	}
	switch until := o.until.Load(); {
	case !failed:
		*row = 0
		if o.trying && o.attempts == attempt {
			s.readmitLocked(o)
		}
	case until != 0 && !o.trying: // a connection from before
	case o.trying:
		s.ejectLocked(o, now)
	case !s.ejections.listed[l.key]: // it is gone, and its last connections end
	default:
		if *row++; *row >= e.After && s.ejections.roomLocked() {
			s.ejections.out.Add(1)
			o.attempts = attempt
			s.ejectLocked(o, now)
		}
	}
}

func (s *Loads) ejectLocked(o *outcomes, now int64) {
	o.until.Store(now + int64(min(firstEjection<<o.doubled, longestEjection)))
	o.trying = false
	o.doubled = min(o.doubled+1, mostDoubled)
	o.refused, o.resets = 0, 0
}

func (s *Loads) readmitLocked(o *outcomes) {
	o.until.Store(0)
	o.trying = false
	o.doubled = max(o.doubled-1, 0)
	s.ejections.out.Add(-1)
}

// ejected reports whether to pass an endpoint over. When its time is over, the first
// connection that may try it does; if that does not fail for as long as the first ejection
// lasts, the endpoint counts as mended.
func (s *Loads) ejected(l *Load, now int64, try bool) bool {
	o := l.outcomes.Load()
	if o == nil {
		return false
	}
	until := o.until.Load()
	if until == 0 || s.ejections.settings.Load() == nil {
		return false
	}
	if now < until || !try {
		return now < until
	}
	s.ejections.mu.Lock()
	defer s.ejections.mu.Unlock()
	switch {
	case o.until.Load() != until:
		return true // another connection tries it
	case o.trying:
		s.readmitLocked(o)
	default:
		o.trying = true
		o.until.Store(now + int64(firstEjection))
	}
	return false
}

// configure takes over the settings and the endpoints. What is not listed is not ejected.
func (s *Loads) configure(e Ejection, port *service.Port) {
	x := &s.ejections
	x.mu.Lock()
	defer x.mu.Unlock()
	x.listed = nil
	if e.After > 0 {
		x.listed = listedIn(port)
		x.settings.Store(&e)
	} else {
		x.settings.Store(nil)
	}
	t := s.table.Load()
	if t == nil || x.out.Load() == 0 {
		return
	}
	for i := range *t {
		l := (*t)[i].Load()
		if l == nil || x.listed[l.key] {
			continue
		}
		if o := l.outcomes.Load(); o != nil && o.until.Load() != 0 {
			s.readmitLocked(o)
		}
	}
}

// Ejected returns the number of endpoints that are ejected.
func (b *Balancer) Ejected() int { return int(b.config.Load().loads.ejections.out.Load()) }
