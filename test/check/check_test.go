package check_test

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// told records what a test says.
type told struct {
	testing.TB
	said []string
}

func (o *told) Helper()                           {}
func (o *told) Error(args ...any)                 { o.said = append(o.said, fmt.Sprint(args...)) }
func (o *told) Errorf(format string, args ...any) { o.Error(fmt.Sprintf(format, args...)) }
func (o *told) Fatal(args ...any)                 { o.Error("the end: " + fmt.Sprint(args...)) }
func (o *told) Fatalf(format string, args ...any) { o.Fatal(fmt.Sprintf(format, args...)) }

func TestDifferencesAreReported(t *testing.T) {
	o := &told{}
	check.Equal(o, 1, 1)
	check.Equalf(o, "a", "a", "step %d", 1)
	must.Equal(o, 1, 1)
	must.Equalf(o, "a", "a", "step %d", 1)
	full := errors.New("no room")
	check.OK(o, nil)
	check.OKf(o, nil, "step %d", 1)
	check.Error(o, full, "room")
	check.Errorf(o, full, "no", "step %d", 1)
	check.EqualSlices(o, []int{1, 2}, []int{1, 2})
	check.EqualSlicesf(o, nil, []int{}, "step %d", 1)
	check.Textf(o, "a\n", "a\n", "step %d", 1)
	check.Contains(o, "a\nb", "b")
	check.Containsf(o, "no room", "room", "step %d", 1)
	check.ErrorIsf(o, fmt.Errorf("bind: %w", full), full, "step %d", 1)
	if len(o.said) > 0 {
		t.Errorf("equal, and it says %q", o.said)
	}
	check.Equal(o, 1, 2)
	check.Equalf(o, "a", "b", "step %d", 1)
	must.Equal(o, struct{ A int }{1}, struct{ A int }{2})
	must.Equalf(o, "a", "b", "step %d", 1)
	check.OK(o, full)
	check.OKf(o, full, "step %d", 2)
	check.Error(o, nil, "room")
	check.Errorf(o, full, "time", "step %d", 3)
	check.EqualSlices(o, []int{1, 2}, []int{2, 1})
	check.EqualSlicesf(o, []string{"a"}, nil, "step %d", 4)
	check.Containsf(o, "room", "no room", "step %d", 5)
	check.ErrorIsf(o, nil, full, "step %d", 6)
	check.Textf(o, "a\nb", "a", "step %d", 7)
	check.Contains(o, "a\nb", "c")
	if want := []string{
		"got 1, want 2", `step 1: got "a", want "b"`, "the end: got {A:1}, want {A:2}", `the end: step 1: got "a", want "b"`,
		"no room", "step 2: no room", "got <nil>, want room", "step 3: got no room, want time",
		"got [1 2], want [2 1]", `step 4: got ["a"], want []`, `step 5: got "room", want "no room"`, "step 6: got <nil>, want no room",
		"step 7: got\na\nb\nwant\na", "no \"c\" in:\na\nb",
	}; !slices.Equal(o.said, want) {
		t.Errorf("says %q, want %q", o.said, want)
	}
}
