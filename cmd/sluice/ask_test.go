package main

import (
	"context"
	"io"
	"strings"
	"testing"
)

// Only yes is yes. Ctrl-C is no, also while nothing is typed.
func TestAgrees(t *testing.T) {
	for text, want := range map[string]bool{"y\n": true, " YES \n": true, "n\n": false, "\n": false, "": false, "yesterday\n": false} {
		if got := agrees(t.Context(), strings.NewReader(text)); got != want {
			t.Errorf("%q: %t", text, got)
		}
	}
	in, typing := io.Pipe()
	t.Cleanup(func() { _ = typing.Close() })
	interrupted, interrupt := context.WithCancel(t.Context())
	interrupt()
	if agrees(interrupted, in) {
		t.Error("Ctrl-C is taken for yes")
	}
}
