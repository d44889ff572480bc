package poll

import "math/bits"

const (
	tickBits  = 23 // a tick is 2^23 ns, 8.4 ms
	levelBits = 6
	levelSize = 1 << levelBits
	levels    = 4
	// horizon is how many ticks ahead the wheel reaches (39 hours). A later
	// timer waits at the horizon and is placed again from there.
	horizon = 1 << (levels * levelBits)
)

// TimerHandler is told that a timer is due. The timer is no longer scheduled and
// may be scheduled again.
type TimerHandler interface {
	HandleTimer(t *Timer)
}

// Timer is one deadline. It is embedded in what it belongs to, and its zero
// value is ready: scheduling it allocates nothing. A scheduled timer must not be
// copied. A timer that is pushed back by every byte should not be rescheduled
// each time: let it fire, compare, and schedule it for the rest.
type Timer struct {
	handler    TimerHandler
	next, prev *Timer
	tick       int64 // when it is due
	place      uint16
}

// unscheduled is the place of a timer outside the wheel; places count from 1.
const unscheduled = 0

// Scheduled reports whether the timer is waiting.
func (t *Timer) Scheduled() bool { return t.place != unscheduled }

// Schedule sets t to fire at the given time of Loop.Now's clock, at most a tick
// later (more when the loop is busy) and never earlier; in the past means at
// the next tick. A timer that is scheduled already is moved.
func (l *Loop) Schedule(t *Timer, at int64, h TimerHandler) { l.wheel.schedule(t, at, h) }

// Cancel takes t out; h is not called. A timer that is not scheduled is left
// alone.
func (l *Loop) Cancel(t *Timer) { l.wheel.cancel(t) }

// wheel is a hierarchical timer wheel. Level n has 64 slots of 64^n ticks each.
// A timer goes into the lowest level that reaches it. When the time comes to the
// beginning of a slot of a higher level, its timers are placed again, lower;
// at level 0 they fire. Scheduling and cancelling take constant time.
type wheel struct {
	current int64 // the last tick that was processed
	heads   [levels * levelSize]*Timer
	busy    [levels]uint64 // a bit for each slot that holds timers
}

func (w *wheel) init(now int64) { w.current = now >> tickBits }

func (w *wheel) schedule(t *Timer, at int64, h TimerHandler) {
	if t.place != unscheduled {
		w.remove(t)
	}
	t.handler = h
	t.tick = max((at+1<<tickBits-1)>>tickBits, w.current+1)
	w.insert(t)
}

func (w *wheel) cancel(t *Timer) {
	if t.place != unscheduled {
		w.remove(t)
		t.handler = nil
	}
}

func (w *wheel) insert(t *Timer) {
	tick := min(t.tick, w.current+horizon-1)
	level := 0
	if d := uint64(tick - w.current); d >= levelSize {
		level = (bits.Len64(d) - 1) / levelBits
	}
	slot := int(tick>>(level*levelBits)) & (levelSize - 1)
	i := level*levelSize + slot
	t.place = uint16(i) + 1
	t.prev, t.next = nil, w.heads[i]
	if t.next != nil {
		t.next.prev = t
	}
	w.heads[i] = t
	w.busy[level] |= 1 << slot
}

func (w *wheel) remove(t *Timer) {
	i := int(t.place) - 1
	t.place = unscheduled
	if t.next != nil {
		t.next.prev = t.prev
	}
	if t.prev != nil {
		t.prev.next = t.next
	} else {
		w.heads[i] = t.next
		if t.next == nil {
			w.busy[i/levelSize] &^= 1 << (i % levelSize)
		}
	}
	t.next, t.prev = nil, nil
}

// nextTick is the next tick at which there is something to do: timers to fire,
// or to place again.
func (w *wheel) nextTick() (tick int64, ok bool) {
	for level := range levels {
		if w.busy[level] == 0 {
			continue
		}
		shift := level * levelBits
		first := w.current>>shift + 1 // the next slot to begin
		ahead := bits.TrailingZeros64(bits.RotateLeft64(w.busy[level], -int(first&(levelSize-1))))
		if at := (first + int64(ahead)) << shift; !ok || at < tick {
			tick, ok = at, true
		}
	}
	return tick, ok
}

// next is the time of nextTick, in nanoseconds.
func (w *wheel) next() (at int64, ok bool) {
	tick, ok := w.nextTick()
	return tick << tickBits, ok
}

// advance fires what is due at now.
func (w *wheel) advance(now int64) {
	target := now >> tickBits
	for w.current < target {
		tick, ok := w.nextTick()
		if !ok || tick > target {
			w.current = target
			return
		}
		w.current = tick
		for level := levels - 1; level > 0; level-- {
			if tick&(1<<(level*levelBits)-1) == 0 {
				w.cascade(level, int(tick>>(level*levelBits))&(levelSize-1))
			}
		}
		w.fire(int(tick) & (levelSize - 1))
	}
}

func (w *wheel) cascade(level, slot int) {
	i := level*levelSize + slot
	t := w.heads[i]
	w.heads[i] = nil
	w.busy[level] &^= 1 << slot
	for t != nil {
		next := t.next
		w.insert(t)
		t = next
	}
}

// fire empties a slot of level 0. A handler may schedule and cancel any timer:
// none can come into this slot, as the earliest is the next tick's.
func (w *wheel) fire(slot int) {
	for {
		t := w.heads[slot]
		if t == nil {
			return
		}
		w.remove(t)
		h := t.handler
		t.handler = nil
		h.HandleTimer(t)
	}
}
