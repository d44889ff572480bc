// Package check reports what a test got and did not want. The test goes on; package must
// ends it.
package check

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

// OK fails the test if there is an error.
func OK(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Error(err)
	}
}

// OKf is OK that says what has failed.
func OKf(t testing.TB, err error, format string, args ...any) {
	if err != nil {
		t.Helper()
		t.Errorf("%s: %v", fmt.Sprintf(format, args...), err)
	}
}

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

// EqualSlices fails the test unless it got the elements that it wants, in their order.
func EqualSlices[S ~[]E, E comparable](t testing.TB, got, want S) {
	if !slices.Equal(got, want) {
		t.Helper()
		t.Error(Difference(got, want))
	}
}

// EqualSlicesf is EqualSlices that says of what.
func EqualSlicesf[S ~[]E, E comparable](t testing.TB, got, want S, format string, args ...any) {
	if !slices.Equal(got, want) {
		t.Helper()
		t.Errorf("%s: %s", fmt.Sprintf(format, args...), Difference(got, want))
	}
}

// Textf fails the test unless a text of several lines is the one that it wants, and says of what.
func Textf(t testing.TB, got, want, format string, args ...any) {
	if got != want {
		t.Helper()
		t.Errorf("%s: got\n%s\nwant\n%s", fmt.Sprintf(format, args...), got, want)
	}
}

// Contains fails the test unless a text contains another one. The text may have many lines.
func Contains(t testing.TB, text, want string) {
	if !strings.Contains(text, want) {
		t.Helper()
		t.Errorf("no %q in:\n%s", want, text)
	}
}

// Containsf is Contains for a short text, and says of what.
func Containsf(t testing.TB, got, want, format string, args ...any) {
	if !strings.Contains(got, want) {
		t.Helper()
		t.Errorf("%s: %s", fmt.Sprintf(format, args...), Difference(got, want))
	}
}

// ErrorIsf fails the test unless there is a certain error, and says of what.
func ErrorIsf(t testing.TB, err, want error, format string, args ...any) {
	if !errors.Is(err, want) {
		t.Helper()
		t.Errorf("%s: %s", fmt.Sprintf(format, args...), Difference(err, want))
	}
}

// Error fails the test unless there is an error that contains a text.
func Error(t testing.TB, err error, want string) {
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Helper()
		t.Error(Difference(err, want))
	}
}

// Errorf is Error that says of what.
func Errorf(t testing.TB, err error, want, format string, args ...any) {
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Helper()
		t.Errorf("%s: %s", fmt.Sprintf(format, args...), Difference(err, want))
	}
}

// Difference says what was got, and what is wanted.
func Difference(got, want any) string {
	switch got.(type) {
	case string, []string:
		return fmt.Sprintf("got %q, want %q", got, want)
	}
	return fmt.Sprintf("got %+v, want %+v", got, want)
}
