package datagram

import (
	"strconv"
	"testing"
	"time"
)

func TestWarningsAreSaidOnceAMinute(t *testing.T) {
	var w warnings
	for i, step := range []struct {
		second int
		cause  string
		unsaid int
		ok     bool
	}{
		{0, "a", 0, true},
		{1, "a", 0, false},
		{2, "b", 0, true},
		{59, "a", 0, false},
		{60, "a", 2, true},
		{61, "a", 0, false},
		{200, "a", 1, true},
		{200, "b", 0, true},
	} {
		unsaid, ok := w.due(step.cause, int64(step.second)*int64(time.Second))
		if unsaid != step.unsaid || ok != step.ok {
			t.Errorf("step %d: %d, %v; want %d, %v", i, unsaid, ok, step.unsaid, step.ok)
		}
	}
	for i := range 3 * mostCauses {
		w.due(strconv.Itoa(i), 0)
	}
	if len(w.causes) > mostCauses {
		t.Errorf("%d causes are remembered, at most %d should be", len(w.causes), mostCauses)
	}
}
