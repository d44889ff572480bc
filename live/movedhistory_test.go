package live

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"reflect"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// carried sends what a History knows to another one, and returns the number of points.
func carried(t *testing.T, from, to *History) (points int) {
	t.Helper()
	if err := from.Move(func(m *MovedHistory) error {
		text, err := json.Marshal(m)
		if err != nil {
			return err
		}
		if len(text) > 100<<10 {
			t.Errorf("a message has %d bytes", len(text))
		}
		var arrived MovedHistory
		if err := json.Unmarshal(text, &arrived); err != nil {
			return err
		}
		for i := range arrived.Series {
			points += len(arrived.Series[i].Points)
		}
		return to.Carry(&arrived)
	}); err != nil {
		t.Fatal(err)
	}
	return points
}

// What a process has measured is in the next one's history, before that one's own.
func TestHistoryMoves(t *testing.T) {
	from, _ := newTestHistory()
	to, _ := newTestHistory()
	whole, _ := newTestHistory()
	from.began, whole.began, to.began = time.Unix(900, 0).UTC(), time.Unix(900, 0).UTC(), time.Unix(1990, 0)
	to.add(frameAt(1000)) // while the other one still served
	for i := range historyIntervals {
		f := frameAt(1000+5*i, groupOf(web, a, 1+i, time.Millisecond), groupOf(dns, b, 2, time.Second))
		if i%3 == 0 {
			f = frameAt(1000+5*i, groupOf(web, b, 1, time.Millisecond))
		}
		from.add(f)
		whole.add(f)
	}
	own := frameAt(1000+5*historyIntervals, groupOf(web, a, 9, 0))
	to.add(own)
	whole.add(own)
	carried(t, from, to)
	for _, by := range []Dimension{0, ByService, ByService | ByEndpoint} {
		got, want := ask(t, to, Question{By: by, Sort: "name"}), ask(t, whole, Question{By: by, Sort: "name"})
		for _, w := range []*Window{got, want} {
			for i := range w.Intervals {
				w.Intervals[i].Time = w.Intervals[i].Time.UTC()
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("by %v: %d of %d series in %d of %d intervals", by.Names(), len(got.Series), len(want.Series), len(got.Intervals), len(want.Intervals))
		}
	}
}

// Of a large history, the latest points move.
func TestMovedHistoryIsBounded(t *testing.T) {
	from, _ := newTestHistory()
	to, _ := newTestHistory()
	groups := make([]Group, 1000)
	for i := range groups {
		ep := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 80)
		name := service.PortName{Name: service.Name{Namespace: "a-long-namespace-of-a-customer", Name: fmt.Sprint("a-service-with-a-long-name-", i)}}
		groups[i] = Group{Key: Key{Service: name, Endpoint: ep}, Opened: 1 << 30, BytesFromClient: 1 << 50, BytesFromEndpoint: 1 << 51}
	}
	for i := range historyIntervals {
		from.add(frameAt(5*i, groups...))
	}
	check.Equalf(t, carried(t, from, to), mostMovedPoints, "points")
	if n := len(to.intervals); n != mostMovedPoints/2000 || !to.intervals[n-1].Time.Equal(from.intervals[historyIntervals-1].Time) {
		t.Errorf("%d intervals", n)
	}
}

// FuzzCarryHistory reads what another process sends.
func FuzzCarryHistory(f *testing.F) {
	from, _ := newTestHistory()
	from.add(frameAt(1000, groupOf(web, a, 1, time.Millisecond)))
	_ = from.Move(func(m *MovedHistory) error {
		text, err := json.Marshal(m)
		f.Add(text)
		return err
	})
	f.Fuzz(func(t *testing.T, text []byte) {
		to, _ := newTestHistory()
		to.add(frameAt(1005, groupOf(web, a, 1, time.Millisecond)))
		var m MovedHistory
		if json.Unmarshal(text, &m) == nil {
			_ = to.Carry(&m)
		}
		if len(to.intervals) > historyIntervals {
			t.Errorf("%d intervals", len(to.intervals))
		}
		ask(t, to, Question{By: ByService})
	})
}
