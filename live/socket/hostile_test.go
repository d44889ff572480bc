package socket

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// serveHostile starts a server with an endless answer at /endless.
func serveHostile(t *testing.T) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/", answering)
	mux.HandleFunc("/endless", func(w http.ResponseWriter, r *http.Request) {
		line := []byte(strings.Repeat("x", 1<<16))
		control := http.NewResponseController(w)
		for r.Context().Err() == nil {
			_ = control.SetWriteDeadline(time.Now().Add(time.Minute))
			if _, err := w.Write(line); err != nil {
				return
			}
		}
	})
	path := filepath.Join(t.TempDir(), "s")
	s, err := Listen(path, mux)
	must.OK(t, err)
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Serve(ctx) }()
	t.Cleanup(func() {
		stop()
		check.OK(t, <-done)
	})
	return path
}

// dial connects as soon as the server has room in its queue.
func dial(t *testing.T, path string) (c net.Conn) {
	t.Helper()
	wait.For(t, "the server accepts", time.Minute, func() (err error) {
		c, err = net.Dial("unix", path)
		return err
	})
	return c
}

// answered waits until a client is answered: the queue of the socket may be full.
func answered(t *testing.T, path string) {
	t.Helper()
	wait.For(t, "a client is answered", time.Minute, func() error {
		if got, err := get(path); got != "true" || err != nil {
			return fmt.Errorf("it is told %q: %v", got, err)
		}
		return nil
	})
}

// Malformed requests are refused, and the next client is answered.
func TestMalformedRequests(t *testing.T) {
	const requests = 10_000
	path := serveHostile(t)
	r := rand.New(rand.NewPCG(5, 6))
	shapes := []string{
		"\x00\x01\x02\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "GET / HTTP/1.1\r\n\r\n", "GET  HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "GET /%zz HTTP/1.1\r\nHost: a\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: a\r\nX: " + strings.Repeat("y", 20<<10) + "\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	}
	for range requests {
		c := dial(t, path)
		text := []byte(shapes[r.IntN(len(shapes))])
		if r.IntN(2) == 0 {
			text[r.IntN(len(text))] = byte(r.UintN(256))
		}
		_, _ = c.Write(text) // the server may have closed it
		_ = c.Close()
	}
	answered(t, path)
}

// Hundreds of clients, a thousand at full size, that never read what they ask for hold no more than their bound,
// and another one is answered.
func TestSlowReadersAreBounded(t *testing.T) {
	clients := 200
	if os.Getenv("SLUICE_TEST_FULL") != "" {
		clients = 1000
	}
	path := serveHostile(t)
	before := runtime.NumGoroutine()
	for i := range clients {
		c := dial(t, path)
		t.Cleanup(func() { _ = c.Close() })
		must.OKf(t, must.Err(fmt.Fprint(c, "GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")), "client %d", i)
	}
	answered(t, path)
	wait.For(t, "no more than the bound are served", time.Minute, func() error {
		if n := runtime.NumGoroutine() - before; n > 3*maxConnections {
			return fmt.Errorf("%d goroutines", n)
		}
		return nil
	})
	// The last ones are still served.
	c := dial(t, path)
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	must.OK(t, must.Err(io.WriteString(c, "GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")))
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	must.OK(t, err)
	defer resp.Body.Close() // reads what is left: the connection ends before
	defer c.Close()
	if _, err := io.CopyN(io.Discard, resp.Body, 1<<20); err != nil && !errors.Is(err, io.EOF) {
		t.Error(err)
	}
}
