package poll

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// alarm is a timer that records when it fired.
type alarm struct {
	Timer
	id   int
	bell func(*alarm)
}

func (a *alarm) HandleTimer(t *Timer) {
	if t != &a.Timer {
		panic("the handler was given another timer")
	}
	a.bell(a)
}

// TestWheelAgainstModel compares the wheel with a map of due times that is searched
// completely.
func TestWheelAgainstModel(t *testing.T) {
	const tick = int64(1) << tickBits
	spans := []int64{1, 10, 63, 64, 65, 700, 4095, 4096, 5000, 262143, 262145, 1 << 22, horizon - 1, horizon, horizon + 1, 3 * horizon}
	for seed := range uint64(40) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(seed, 1))
			var w wheel
			now := rng.Int64N(1 << 50)
			w.init(now)
			model := map[int]int64{} // due tick by id
			var fired []int
			alarms := make([]alarm, 50)
			schedule := func(a *alarm) {
				at := now + rng.Int64N(spans[rng.IntN(len(spans))]*tick) - tick
				w.schedule(&a.Timer, at, a)
				due := at / tick
				if at%tick != 0 {
					due++
				}
				model[a.id] = max(due, w.current+1)
			}
			for i := range alarms {
				alarms[i].id = i
				alarms[i].bell = func(a *alarm) {
					if a.Scheduled() {
						t.Fatal("a timer that fires is still scheduled")
					}
					must.Equalf(t, w.current, model[a.id], "the tick at which it fired")
					delete(model, a.id)
					fired = append(fired, a.id)
					switch rng.IntN(4) {
					case 0:
						schedule(a) // again, from its own handler
					case 1:
						other := &alarms[rng.IntN(len(alarms))]
						if other != a && model[other.id] > w.current {
							w.cancel(&other.Timer)
							delete(model, other.id)
						}
					}
				}
			}
			for step := range 3000 {
				switch rng.IntN(5) {
				case 0, 1:
					schedule(&alarms[rng.IntN(len(alarms))])
				case 2:
					a := &alarms[rng.IntN(len(alarms))]
					w.cancel(&a.Timer)
					delete(model, a.id)
				default:
					before := now
					now += rng.Int64N(spans[rng.IntN(len(spans))] * tick)
					fired = fired[:0]
					w.advance(now)
					for id, due := range model {
						if due <= now>>tickBits {
							t.Fatalf("step %d: timer %d, due at %d, is late: %d -> %d, fired %v", step, id, due, before>>tickBits, now>>tickBits, fired)
						}
					}
				}
				checkWheel(t, &w, alarms, model)
			}
		})
	}
}

// checkWheel compares the wheel's timers, and the time that it returns for the next work,
// with the model.
func checkWheel(t *testing.T, w *wheel, alarms []alarm, model map[int]int64) {
	t.Helper()
	held := 0
	for i, head := range w.heads {
		must.Equalf(t, head != nil, w.busy[i/levelSize]&(1<<(i%levelSize)) != 0, "slot %d: the bit is wrong", i)
		for timer := head; timer != nil; timer = timer.next {
			held++
		}
	}
	must.Equalf(t, held, len(model), "timers in the wheel, %d in the model", len(model))
	var dues []int64
	for i := range alarms {
		due, ok := model[i]
		must.Equalf(t, ok, alarms[i].Scheduled(), "timer %d: scheduled %v, in the model", i, alarms[i].Scheduled())
		if ok {
			dues = append(dues, due)
		}
	}
	next, ok := w.nextTick()
	must.Equalf(t, ok, len(dues) > 0, "next tick known, with %d timers", len(dues))
	if ok && (next > slices.Min(dues) || next <= w.current) {
		t.Fatalf("next tick %d, now %d, earliest timer %d", next, w.current, slices.Min(dues))
	}
}

func TestTimerCostsNoAllocation(t *testing.T) {
	var w wheel
	w.init(0)
	a := &alarm{bell: func(*alarm) {}}
	now := int64(0)
	if n := testing.AllocsPerRun(1000, func() {
		w.schedule(&a.Timer, now+1e9, a)
		w.schedule(&a.Timer, now+1e7, a)
		now += 1e8
		w.advance(now)
		w.schedule(&a.Timer, now+1e12, a)
		w.cancel(&a.Timer)
	}); n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

func BenchmarkSchedule(b *testing.B) {
	for _, size := range []int{1, 10_000} {
		b.Run(fmt.Sprintf("timers=%d", size), func(b *testing.B) {
			var w wheel
			w.init(0)
			alarms := make([]alarm, size)
			i := 0
			for b.Loop() {
				a := &alarms[i%size]
				w.schedule(&a.Timer, int64(i%100_000)*1e6, a)
				i++
			}
		})
	}
}
