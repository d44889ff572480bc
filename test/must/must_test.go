package must

import (
	"errors"
	"fmt"
	"testing"
)

// ended records what ends a test.
type ended struct {
	testing.TB
	by string
}

func (e *ended) Helper()                           {}
func (e *ended) Fatal(args ...any)                 { e.by = fmt.Sprint(args...) }
func (e *ended) Fatalf(format string, args ...any) { e.by = fmt.Sprintf(format, args...) }

func TestErrorsEndTests(t *testing.T) {
	e := &ended{}
	OK(e, nil)
	OKf(e, nil, "step %d", 1)
	if got := Get(7, nil)(e); got != 7 {
		t.Errorf("got %d, want 7", got)
	}
	if e.by != "" {
		t.Errorf("no error, and it ended with %q", e.by)
	}
	if OK(e, errors.New("no room")); e.by != "no room" {
		t.Errorf("ended with %q", e.by)
	}
	if Get(7, errors.New("no time"))(e); e.by != "no time" {
		t.Errorf("ended with %q", e.by)
	}
	if OKf(e, errors.New("no room"), "step %d", 2); e.by != "step 2: no room" {
		t.Errorf("ended with %q", e.by)
	}
}
