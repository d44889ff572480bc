package poll

import "math/bits"

const (
	tickBits  = 23 // a tick is 2^23 ns, 8.4 ms
	levelBits = 6
	levelSize = 1 << levelBits
	levels    = 4
	// horizon is the range of the wheel in ticks (39 hours). A later timer waits at
	// the horizon and is inserted again from there.
	horizon = 1 << (levels * levelBits)
)

// TimerHandler is called when a timer is due. The timer is then unscheduled and may
// be scheduled again.
type TimerHandler interface {
	HandleTimer(t *Timer)
}

// Timer is one deadline, embedded in the object that it belongs to. Its zero value
// is ready for use, and scheduling does not allocate. Do not copy a scheduled
// timer. To extend a deadline often, such as for each byte, do not reschedule each
// time: let the timer fire, compare, and schedule it for the remaining time.
type Timer struct {
	handler    TimerHandler
	next, prev *Timer
	due        int64 // tick << placeBits, and the place in the wheel
}

// placeBits is how many bits of Timer.due are the place.
const placeBits = 16

func (t *Timer) tick() int64 { return t.due >> placeBits }

func (t *Timer) place() int { return int(t.due & (1<<placeBits - 1)) }

// unscheduled is the place of a timer outside the wheel. Places count from 1.
const unscheduled = 0

// Scheduled reports whether the timer is scheduled.
func (t *Timer) Scheduled() bool { return t.place() != unscheduled }

// Schedule sets t to fire at the given time of Loop.Now's clock, or up to a tick
// later (more if the loop is busy), never earlier. A time in the past means the
// next tick. It moves a timer that is already scheduled.
func (l *Loop) Schedule(t *Timer, at int64, h TimerHandler) { l.wheel.schedule(t, at, h) }

// Cancel unschedules t without calling its handler. It does nothing if t is not
// scheduled.
func (l *Loop) Cancel(t *Timer) { l.wheel.cancel(t) }

// wheel is a hierarchical timer wheel. Level n has 64 slots of 64^n ticks each.
// insert puts a timer into the lowest level that reaches its time. When the time
// reaches a slot of a higher level, cascade inserts its timers again at lower
// levels. Timers fire at level 0. Scheduling and cancelling take constant time.
type wheel struct {
	current int64 // the last processed tick
	heads   [levels * levelSize]*Timer
	busy    [levels]uint64 // a bit for each slot with timers
}

func (w *wheel) init(now int64) { w.current = now >> tickBits }

func (w *wheel) schedule(t *Timer, at int64, h TimerHandler) {
	if t.place() != unscheduled {
		w.remove(t)
	}
	t.handler = h
	t.due = max((at+1<<tickBits-1)>>tickBits, w.current+1) << placeBits
	w.insert(t)
}

func (w *wheel) cancel(t *Timer) {
	if t.place() != unscheduled {
		w.remove(t)
		t.handler = nil
	}
}

func (w *wheel) insert(t *Timer) {
	tick := min(t.tick(), w.current+horizon-1)
	level := 0
	if d := uint64(tick - w.current); d >= levelSize {
		level = (bits.Len64(d) - 1) / levelBits
	}
	slot := int(tick>>(level*levelBits)) & (levelSize - 1)
	i := level*levelSize + slot
	t.due = t.tick()<<placeBits | int64(i+1)
	t.prev, t.next = nil, w.heads[i]
	if t.next != nil {
		t.next.prev = t
	}
	w.heads[i] = t
	w.busy[level] |= 1 << slot
}

func (w *wheel) remove(t *Timer) {
	i := t.place() - 1
	t.due &^= 1<<placeBits - 1 // unscheduled
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

// nextTick returns the next tick with timers to fire or to cascade.
func (w *wheel) nextTick() (tick int64, ok bool) {
	for level := range levels {
		if w.busy[level] == 0 {
			continue
		}
		shift := level * levelBits
		first := w.current>>shift + 1 // the next slot
		ahead := bits.TrailingZeros64(bits.RotateLeft64(w.busy[level], -int(first&(levelSize-1))))
		if at := (first + int64(ahead)) << shift; !ok || at < tick {
			tick, ok = at, true
		}
	}
	return tick, ok
}

// next returns the time of nextTick in nanoseconds.
func (w *wheel) next() (at int64, ok bool) {
	tick, ok := w.nextTick()
	return tick << tickBits, ok
}

// advance fires all timers that are due at now.
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

// fire runs the timers of a slot of level 0. A handler may schedule and cancel any
// timer. None can enter this slot, because the earliest possible time is the next
// tick.
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
