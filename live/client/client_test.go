package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/live/socket"
	"github.com/sluice-proxy/sluice/test/must"
)

// serve answers at a socket until the test ends.
func serve(t *testing.T, path string, h http.HandlerFunc) {
	t.Helper()
	s, err := socket.Listen(path, h)
	must.OK(t, err)
	done := make(chan struct{})
	ctx, stop := context.WithCancel(context.Background())
	go func() { defer close(done); _ = s.Serve(ctx) }()
	t.Cleanup(func() { stop(); <-done })
}

// Only root and our user are believed, and an abstract socket of root's is for root alone.
func TestBelieved(t *testing.T) {
	const us, other = 1000, 1001
	for _, tt := range []struct {
		name      string
		peer, own int
		want      string
	}{
		{"/s", 0, 0, ""}, {"/s", us, us, ""}, {"/s", 0, us, ""}, {"@s", 0, 0, ""}, {"@s", us, us, ""},
		{"/s", other, us, "uid 1001"}, {"@s", other, us, "uid 1001"}, {"@s", us, 0, "uid 1000"}, {"@s", 0, us, "no right to use @s"},
	} {
		got := ""
		if err := believed(tt.name, tt.peer, tt.own); err != nil {
			got = advise(tt.name, fmt.Errorf("dial: %w", err)).Error()
		}
		if tt.want == "" && got != "" || !strings.Contains(got, tt.want) {
			t.Errorf("%s of %d, for %d: %q, want %q", tt.name, tt.peer, tt.own, got, tt.want)
		}
	}
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
