package httpport

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// serve returns the address of a server of the group. "/slow" answers when the
// client has gone.
func serve(t *testing.T, g *Group) string {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	mux.HandleFunc("/slow", func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() })
	large := make([]byte, 16<<20) // more than the sockets' buffers take
	mux.HandleFunc("/large", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(large) })
	l := must.Get(net.Listen("tcp4", "0.0.0.0:0"))(t)
	s := New(g, mux, time.Minute)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(func() { _ = s.Close() })
	return fmt.Sprintf("127.0.0.1:%d", l.Addr().(*net.TCPAddr).Port)
}

// dial connects from an address of loopback and sends a text.
func dial(t *testing.T, from, to, text string) net.Conn {
	t.Helper()
	d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	c := must.Get(d.DialContext(context.Background(), "tcp4", to))(t)
	t.Cleanup(func() { _ = c.Close() })
	_, _ = io.WriteString(c, text) // it may be closed before it is through
	return c
}

// ask sends a request on a connection and wants an answer.
func ask(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: node\r\n\r\n"); err != nil {
		return err
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// A header of 16 KiB is taken, and a longer one is not.
func TestHeaderIsBounded(t *testing.T) {
	address := serve(t, &Group{})
	for size, want := range map[int]int{maxHeader: http.StatusOK, maxHeader + 1: http.StatusRequestHeaderFieldsTooLarge} {
		text := "GET / HTTP/1.1\r\nHost: node\r\nX: \r\n\r\n"
		text = strings.Replace(text, "X: ", "X: "+strings.Repeat("x", size-len(text)), 1)
		c := dial(t, "127.0.0.1", address, text)
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		must.OKf(t, err, "%d bytes", size)
		_ = resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("%d bytes: %s, want %d", size, resp.Status, want)
		}
	}
}

func (g *Group) count() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.open)
}

// TestGroupIsBounded floods a server in each way of holding a connection: there
// are never more than the bound, a new client is answered, and so is another
// address's client that was there before.
func TestGroupIsBounded(t *testing.T) {
	const request = "GET / HTTP/1.1\r\nHost: node\r\n\r\n"
	for name, text := range map[string]string{
		"idle":           request,
		"silent":         "",
		"half a header":  "GET / HTTP/1.1\r\nHost: no",
		"half a body":    "POST / HTTP/1.1\r\nHost: node\r\nContent-Length: 9\r\n\r\nx",
		"being answered": "GET /slow HTTP/1.1\r\nHost: node\r\n\r\n",
		"never reading":  "GET /large HTTP/1.1\r\nHost: node\r\n\r\n",
		"large header":   "GET / HTTP/1.1\r\nHost: node\r\nX: " + strings.Repeat("x", 32<<10),
		"large body":     "POST / HTTP/1.1\r\nHost: node\r\nContent-Length: 1000000\r\n\r\n",
		"endless body":   "POST / HTTP/1.1\r\nHost: node\r\nTransfer-Encoding: chunked\r\n\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			g := &Group{Max: 8}
			to := serve(t, g)
			probe := dial(t, "127.0.0.9", to, "")
			must.OK(t, ask(probe))
			for range 200 {
				dial(t, "127.0.0.2", to, text)
				if n := g.count(); n > g.Max {
					t.Fatalf("%d connections, want at most %d", n, g.Max)
				}
			}
			check.OKf(t, ask(dial(t, "127.0.0.2", to, "")), "a new connection of the same address")
			check.OKf(t, ask(probe), "the connection of another address")
			if n := g.Evicted(); n == 0 && name != "large body" && name != "endless body" {
				t.Error("no connection is counted as evicted")
			}
		})
	}
}

// TestIdleGoesFirst fills a group from as many addresses as it has places: of
// clients with one connection each, an idle one goes before those that have not
// asked yet, and these before those that are being answered.
func TestIdleGoesFirst(t *testing.T) {
	g := &Group{Max: 3}
	to := serve(t, g)
	state := func(n int, want http.ConnState) {
		t.Helper()
		wait.For(t, "the server has taken note", 20*time.Second, func() error {
			g.mu.Lock()
			defer g.mu.Unlock()
			for c := range g.open {
				if c.state == want {
					n--
				}
			}
			if n != 0 {
				return fmt.Errorf("%d connections are missing in state %v", n, want)
			}
			return nil
		})
	}
	busy := dial(t, "127.0.0.2", to, "GET /slow HTTP/1.1\r\nHost: node\r\n\r\n")
	state(1, http.StateActive)
	silent := dial(t, "127.0.0.3", to, "")
	state(1, http.StateNew)
	idle := dial(t, "127.0.0.4", to, "")
	must.OK(t, ask(idle))
	state(1, http.StateIdle)
	gone := func(c net.Conn) {
		t.Helper()
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || strings.Contains(err.Error(), "timeout") {
			t.Errorf("%s is open, want it closed: %v", c.LocalAddr(), err)
		}
	}
	dial(t, "127.0.0.5", to, "")
	gone(idle)
	dial(t, "127.0.0.6", to, "")
	gone(silent)
	_ = busy.SetReadDeadline(time.Now().Add(10 * time.Millisecond))
	check.Errorf(t, must.Err(busy.Read(make([]byte, 1))), "timeout", "the connection that is being answered")
}

// Each of several servers that wait for room in their Group goes on when a connection has ended.
func TestAllWhoWaitForAFullGroupGoOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := &Group{Max: 1}
		admit := func() *conn {
			near, far := net.Pipe()
			t.Cleanup(func() { _, _ = near.Close(), far.Close() })
			return g.admit(near)
		}
		var ending []*conn
		for range maxEnding {
			ending = append(ending, admit())
		}
		var admitted atomic.Int32
		for range 2 {
			go func() {
				admit()
				admitted.Add(1)
			}()
		}
		synctest.Wait()
		for i := range int32(2) {
			g.stateChanged(ending[i], http.StateClosed)
			if synctest.Wait(); admitted.Load() != i+1 {
				t.Fatalf("%d are admitted after %d have ended", admitted.Load(), i+1)
			}
		}
	})
}

// A server that leaves before it could serve closes the listener that it is given.
func TestServeAfterLeave(t *testing.T) {
	s := New(&Group{}, http.NotFoundHandler(), time.Minute)
	s.Leave()
	l := must.Get(net.Listen("tcp4", "127.0.0.1:0"))(t)
	check.Equal(t, s.Serve(l), http.ErrServerClosed)
	_, err := l.Accept()
	if !errors.Is(err, net.ErrClosed) {
		t.Errorf("the listener is open: %v", err)
	}
}
