// Package must ends a test at its first error.
package must

import (
	"fmt"
	"os"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

// OK ends the test if there is an error.
func OK(t testing.TB, err error) {
	if err != nil {
		t.Helper()
		t.Fatal(err)
	}
}

// OKf is OK that says what has failed.
func OKf(t testing.TB, err error, format string, args ...any) {
	if err != nil {
		t.Helper()
		t.Fatalf("%s: %v", fmt.Sprintf(format, args...), err)
	}
}

// Equal ends the test unless it got what it wants.
func Equal[T comparable](t testing.TB, got, want T) {
	if got != want {
		t.Helper()
		t.Fatal(check.Difference(got, want))
	}
}

// Equalf is Equal that says of what.
func Equalf[T comparable](t testing.TB, got, want T, format string, args ...any) {
	if got != want {
		t.Helper()
		t.Fatalf("%s: %s", fmt.Sprintf(format, args...), check.Difference(got, want))
	}
}

// Err returns the error of a call whose result nobody needs.
func Err[T any](_ T, err error) error { return err }

// Get returns the result of a call, or ends the test with its error: must.Get(os.Open(path))(t).
func Get[T any](result T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		OK(t, err)
		return result
	}
}

// Read returns what is in a file.
func Read(t testing.TB, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	OK(t, err)
	return text
}

// Run runs a program, and ends the test with what the program said if it fails.
func Run(t testing.TB, program interface {
	CombinedOutput() ([]byte, error)
	String() string
}) {
	if out, err := program.CombinedOutput(); err != nil {
		t.Helper()
		t.Fatalf("%s: %v\n%s", program, err, out)
	}
}
