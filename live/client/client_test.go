package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"testing"

	"github.com/sluice-proxy/sluice/live/socket"
)

// serve answers at a socket until the test ends.
func serve(t *testing.T, path string, h http.HandlerFunc) {
	t.Helper()
	s, err := socket.Listen(path, h)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	ctx, stop := context.WithCancel(context.Background())
	go func() { defer close(done); _ = s.Serve(ctx) }()
	t.Cleanup(func() { stop(); <-done })
}

// A stream that is cut in the middle says what that means.
func TestStreamIsCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	serve(t, path, func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintln(w, `{"a":1}`)
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	lines := 0
	err := New(path).Stream(t.Context(), "/v1/tap", nil, func([]byte) error {
		lines++
		return nil
	})
	if lines != 1 || !errors.Is(err, ErrEnded) {
		t.Errorf("%d lines, then %v", lines, err)
	}
}
