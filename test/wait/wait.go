// Package wait waits for expected events, so that no test sleeps and hopes.
package wait

import (
	"errors"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// Patience bounds waits whose length is not under test. It is long because test
// machines may be busy.
const Patience = 20 * time.Second

// pause waits between two checks: a twentieth of the time that it has taken so far, as
// checks cost CPU time.
func pause(began time.Time) {
	time.Sleep(min(max(time.Since(began)/20, 2*time.Millisecond), 20*time.Millisecond))
}

// True waits until a condition holds, at most for Patience, and fails the test
// otherwise.
func True(t testing.TB, what string, condition func() bool) {
	t.Helper()
	Until(t, what, Patience, condition)
}

// Until is True with a bound.
func Until(t testing.TB, what string, within time.Duration, condition func() bool) {
	t.Helper()
	if Poll(within, func() error {
		if condition() {
			return nil
		}
		return errNotYet
	}) != nil {
		t.Fatalf("%s: not within %v", what, within)
	}
}

var errNotYet = errors.New("not yet")

// For waits until a condition returns nil, and fails the test with its last error
// if it does not in time.
func For(t testing.TB, what string, within time.Duration, condition func() error) {
	t.Helper()
	must.OKf(t, Poll(within, condition), "%s: not within %v", what, within)
}

// Equal waits until a function returns what is wanted, and fails the test with what it returned
// last if it does not in time.
func Equal[T comparable](t testing.TB, what string, within time.Duration, want T, get func() T) {
	t.Helper()
	For(t, what, within, func() error {
		if got := get(); got != want {
			return errors.New(check.Difference(got, want))
		}
		return nil
	})
}

// Poll is For where it may not end the test: it returns the last error. It checks
// once more after the time is up, as a busy machine may have delayed the checks.
func Poll(within time.Duration, condition func() error) error {
	for began := time.Now(); ; pause(began) {
		late := time.Since(began) > within
		if err := condition(); err == nil || late {
			return err
		}
	}
}
