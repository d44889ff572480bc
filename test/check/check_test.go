package check

import (
	"errors"
	"fmt"
	"testing"
)

// told records what a test says.
type told struct {
	testing.TB
	text string
}

func (t *told) Helper()                           {}
func (t *told) Error(args ...any)                 { t.text = fmt.Sprint(args...) }
func (t *told) Errorf(format string, args ...any) { t.text = fmt.Sprintf(format, args...) }

func TestDifferencesAreTold(t *testing.T) {
	full := errors.New("no room")
	for want, check := range map[string]func(t testing.TB){
		"": func(t testing.TB) {
			Equal(t, 1, 1)
			Equalf(t, "a", "a", "step %d", 1)
			Error(t, full, "room")
			Errorf(t, full, "no", "step %d", 1)
		},
		"got 1, want 2":                     func(t testing.TB) { Equal(t, 1, 2) },
		`step 1: got "a", want "b"`:         func(t testing.TB) { Equalf(t, "a", "b", "step %d", 1) },
		"got <nil>, want room":              func(t testing.TB) { Error(t, nil, "room") },
		"step 2: got no room, want no time": func(t testing.TB) { Errorf(t, full, "no time", "step %d", 2) },
		"no room":                           func(t testing.TB) { OK(t, full) },
		"step 3: no room":                   func(t testing.TB) { OKf(t, full, "step %d", 3) },
	} {
		got := &told{}
		if check(got); got.text != want {
			t.Errorf("told %q, want %q", got.text, want)
		}
	}
}
