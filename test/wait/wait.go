// Package wait waits for what is to happen soon, so that no test sleeps and
// hopes.
package wait

import (
	"testing"
	"time"
)

// Patience bounds waits whose length is not itself under test. It is long
// because machines that test have other work.
const Patience = 20 * time.Second

// pause waits between two looks, for longer where it has taken a while already.
func pause(began time.Time) {
	if time.Since(began) < time.Second {
		time.Sleep(2 * time.Millisecond)
		return
	}
	time.Sleep(20 * time.Millisecond)
}

// True waits until a condition holds, for Patience at most, and fails the test
// otherwise.
func True(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for began := time.Now(); !condition(); pause(began) {
		if time.Since(began) > Patience {
			t.Fatalf("%s: not within %v", what, Patience)
		}
	}
}

// For waits until a condition gives nil, and fails the test with its last error
// when it does not in time.
func For(t testing.TB, what string, within time.Duration, condition func() error) {
	t.Helper()
	if err := Poll(within, condition); err != nil {
		t.Fatalf("%s: not within %v: %v", what, within, err)
	}
}

// Poll is For where the test may not be ended: it gives the last error. The last
// look is after the time is up, as a busy machine may not have looked for a while.
func Poll(within time.Duration, condition func() error) error {
	for began := time.Now(); ; pause(began) {
		late := time.Since(began) > within
		if err := condition(); err == nil || late {
			return err
		}
	}
}
