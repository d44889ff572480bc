package demo

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/scratch"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// hotel is a demo that consists of the door and of one namespace.
type hotel struct {
	t      *testing.T
	door   *net.UnixAddr
	here   *scratch.Namespace
	stop   context.CancelFunc
	closed chan struct{}
}

func openHotel(t *testing.T) *hotel {
	netns.Require(t)
	here := must.Get(scratch.New("inside"))(t)
	t.Cleanup(here.Close)
	h := &hotel{t: t, door: testDoor(t), here: here, closed: make(chan struct{})}
	l := must.Get(openDoor(h.door, os.Geteuid()))(t)
	var ctx context.Context
	ctx, h.stop = context.WithCancel(context.Background())
	g := &guests{door: l, place: func(from string) (*scratch.Namespace, error) {
		if from != FromNode {
			return nil, errors.New("no such place")
		}
		return here, nil
	}}
	go func() {
		defer close(h.closed)
		g.serve(ctx)
	}()
	t.Cleanup(func() {
		h.stop()
		<-h.closed
	})
	return h
}

// guest is a command that runs in the hotel.
type guest struct {
	conn   *net.UnixConn
	in     *os.File // its standard input
	out    *os.File // its standard output and error
	result chan error
	status int
}

func (h *hotel) enter(r *request) *guest {
	h.t.Helper()
	c := must.Get(knock(h.door, os.Geteuid()))(h.t)
	inR, inW, err := os.Pipe()
	must.OK(h.t, err)
	outR, outW, err := os.Pipe()
	must.OK(h.t, err)
	h.t.Cleanup(func() {
		for _, f := range []io.Closer{c, inR, inW, outR, outW} {
			f.Close()
		}
	})
	must.OK(h.t, outR.SetDeadline(time.Now().Add(20*time.Second)))
	g := &guest{conn: c, in: inW, out: outR, result: make(chan error, 1)}
	go func() {
		var err error
		g.status, err = visitDemo(c, r, inR, outW, outW)
		outW.Close()
		inR.Close()
		g.result <- err
	}()
	return g
}

func (g *guest) wait(t *testing.T, status int) {
	t.Helper()
	select {
	case err := <-g.result:
		if err != nil || g.status != status {
			t.Errorf("status %d, %v; want %d", g.status, err, status)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the command does not end")
	}
}

// awaitText reads until the text comes.
func (g *guest) awaitText(t *testing.T, text string) {
	t.Helper()
	var got []byte
	b := make([]byte, 256)
	for !strings.Contains(string(got), text) {
		n, err := g.out.Read(b)
		if err != nil {
			t.Fatalf("read %q, then %v, want %q", got, err, text)
		}
		got = append(got, b[:n]...)
	}
}

func shell(t *testing.T, script string) *request {
	t.Helper()
	path := must.Get(exec.LookPath("sh"))(t)
	return &request{Path: path, Args: []string{"sh", "-c", script}, Env: append(os.Environ(), "GREETING=good morning"), Dir: "/", From: FromNode}
}

func TestGuest(t *testing.T) {
	h := openHotel(t)
	var want string
	must.OK(t, h.here.Do(func() (err error) {
		want, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	}))

	g := h.enter(shell(t, `echo "$GREETING"; pwd; readlink /proc/self/ns/net; cat; echo oops >&2; exit 42`))
	must.OK(t, must.Err(g.in.WriteString("from outside\n")))
	g.in.Close()
	g.wait(t, 42)
	got, err := io.ReadAll(g.out)
	if want := "good morning\n/\n" + want + "\nfrom outside\noops\n"; err != nil || string(got) != want {
		t.Errorf("got %q, %v; want %q", got, err, want)
	}
}

func TestGuestSignals(t *testing.T) {
	h := openHotel(t)

	g := h.enter(shell(t, `trap 'echo caught; exit 3' INT; echo waiting; while :; do sleep 0.01; done`))
	g.awaitText(t, "waiting\n")
	// The whole group gets it: the shell and its sleep.
	must.OK(t, must.Err(io.WriteString(g.conn, `{"signal":2}`)))
	g.awaitText(t, "caught\n")
	g.wait(t, 3)

	g = h.enter(shell(t, `echo waiting; kill -KILL $$`))
	g.wait(t, 128+int(syscall.SIGKILL))
}

func TestGuestErrors(t *testing.T) {
	h := openHotel(t)
	missing := shell(t, "true")
	missing.Path = "/no/such/program"
	elsewhere := shell(t, "true")
	elsewhere.From = "moon"
	nowhere := shell(t, "true")
	nowhere.Dir = "/no/such/directory"
	for r, want := range map[*request]string{missing: "no such file", elsewhere: "no such place", nowhere: "no such file"} {
		g := h.enter(r)
		if err := <-g.result; err == nil || !strings.Contains(err.Error(), want) || g.status != statusNotStarted {
			t.Errorf("%s from %s: status %d, %v; want %q", r.Path, r.From, g.status, err, want)
		}
	}
}

// A command goes when its visitor goes, and when the demo does.
func TestGuestIsSeenOff(t *testing.T) {
	for _, who := range []string{"visitor", "demo"} {
		h := openHotel(t)
		g := h.enter(shell(t, `trap '' INT; echo waiting; while :; do sleep 0.01; done`))
		g.awaitText(t, "waiting\n")
		if who == "visitor" {
			g.conn.Close()
		} else {
			h.stop()
		}
		select {
		case <-g.result:
		case <-time.After(20 * time.Second):
			t.Fatalf("the %s has gone, the command runs on", who)
		}
		h.stop()
		<-h.closed // serve waits for its commands
		// Nobody has the other end of the pipe any more: not the shell, and
		// soon not its sleep.
		wait.True(t, "EPIPE for who writes to the command after the "+who+" has gone", func() bool {
			_, err := g.in.WriteString("x")
			return errors.Is(err, syscall.EPIPE)
		})
	}
}

// Whoever only looks whether the demo is there, or talks nonsense, does no harm.
func TestGuestNonsense(t *testing.T) {
	h := openHotel(t)
	for _, text := range []string{"", "x", "1{}"} {
		c := must.Get(knock(h.door, os.Geteuid()))(t)
		must.OK(t, must.Err(io.WriteString(c, text)))
		must.OK(t, c.CloseWrite())
		must.OK(t, c.SetDeadline(time.Now().Add(20*time.Second)))
		answer, err := io.ReadAll(c)
		if err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%q: %v", text, err)
		}
		if text != "" && err == nil && !strings.Contains(string(answer), "error") {
			t.Errorf("%q: answer %q, want an error", text, answer)
		}
		c.Close()
	}
	h.enter(shell(t, "exit 5")).wait(t, 5)
}
