package main

import (
	"context"
	"io"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

// Only yes is yes. Ctrl-C is no, also while nothing is typed.
func TestAgrees(t *testing.T) {
	for text, want := range map[string]bool{"y\n": true, " YES \n": true, "n\n": false, "\n": false, "": false, "yesterday\n": false} {
		check.Equalf(t, agrees(t.Context(), strings.NewReader(text)), want, "%q", text)
	}
	in, typing := io.Pipe()
	t.Cleanup(func() { _ = typing.Close() })
	interrupted, interrupt := context.WithCancel(t.Context())
	interrupt()
	if agrees(interrupted, in) {
		t.Error("Ctrl-C is taken for yes")
	}
}
