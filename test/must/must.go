// Package must ends a test at its first error.
package must

import (
	"fmt"
	"testing"
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
