// Package check reports what a test got and did not want. The test goes on; package must
// ends it.
package check

import (
	"fmt"
	"testing"
)

// Equal fails the test unless it got what it wants.
func Equal[T comparable](t testing.TB, got, want T) {
	if got != want {
		t.Helper()
		t.Error(Difference(got, want))
	}
}

// Equalf is Equal that says of what.
func Equalf[T comparable](t testing.TB, got, want T, format string, args ...any) {
	if got != want {
		t.Helper()
		t.Errorf("%s: %s", fmt.Sprintf(format, args...), Difference(got, want))
	}
}

// Difference says what was got, and what is wanted.
func Difference(got, want any) string {
	if _, ok := got.(string); ok {
		return fmt.Sprintf("got %q, want %q", got, want)
	}
	return fmt.Sprintf("got %+v, want %+v", got, want)
}
