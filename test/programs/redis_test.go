//go:build programs

package programs

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/debian"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/output"
)

// redis runs Redis on the first backend.
func redis(t *testing.T) (*world, *server) {
	t.Helper()
	w := newWorld(t, 1, 6379)
	dir := debian.Directory(t)
	return w, w.serve(w.Backends[0], dir, "redis-server", "--port", strconv.Itoa(int(w.port)), "--bind", "0.0.0.0", "::",
		"--protected-mode", "no", "--save", "", "--appendonly", "no", "--dir", dir)
}

func (w *world) redis(vip string, more ...string) []string {
	return append([]string{"-h", vip, "-p", strconv.Itoa(int(w.port))}, more...)
}

// TestRedisBenchmark runs redis-benchmark, one request at a time and sixteen.
func TestRedisBenchmark(t *testing.T) {
	w, _ := redis(t)
	requests := "10000"
	if full() {
		requests = "100000"
	}
	for _, vip := range vips {
		for _, pipeline := range []string{"1", "16"} {
			out := w.client("redis-benchmark", w.redis(vip, "-t", "set,get,lpush,mset", "-n", requests, "-c", "50", "-P", pipeline, "-d", "512", "--csv")...)
			if n := strings.Count(out, "\n"); n < 5 || strings.Contains(strings.ToLower(out), "error") {
				t.Errorf("redis-benchmark said:\n%s", out)
			}
		}
	}
}

// TestRedisPipeToAPausedServer sends commands by `redis-cli --pipe` to a server
// that is stopped in between for longer than a minute. Each must be executed once.
func TestRedisPipeToAPausedServer(t *testing.T) {
	const commands = 200_000 // 24 MB
	w, s := redis(t)
	for i, vip := range vips {
		cmd := debian.As(w.Client.Command(t, debian.Find(t, "redis-cli"), w.redis(vip, "--pipe", "--pipe-timeout", "0")...), "/")
		in, err := cmd.StdinPipe()
		var said output.Text
		cmd.Stdout, cmd.Stderr = &said, &said
		if err == nil {
			err = cmd.Start()
		}
		must.OK(t, err)
		value := strings.Repeat("v", 100)
		for n := range commands {
			if n == commands/3 {
				s.signal(syscall.SIGSTOP)
				time.AfterFunc(longPause(), func() { _ = s.cmd.Process.Signal(syscall.SIGCONT) })
			}
			// The counter shows whether a command was executed twice.
			must.OKf(t, must.Err(fmt.Fprintf(in, "APPEND k%d-%d %s\r\nINCR count%d\r\n", i, n, value, i)), "after %d commands", n)
		}
		_ = in.Close()
		check.OKf(t, cmd.Wait(), "redis-cli")
		w.want(said.String(), fmt.Sprintf("errors: 0, replies: %d", 2*commands))
		if got := w.client("redis-cli", w.redis(vip, "get", fmt.Sprintf("count%d", i))...); strings.Trim(got, "\"\n") != strconv.Itoa(commands) {
			t.Errorf("%s commands were executed of %d", got, commands)
		}
		if full() {
			break // one family suffices for such a long pause
		}
	}
}

// TestRedisClientsOutliveAPausedServer keeps idle connections, and one that waits
// for its answer, while the server is stopped.
func TestRedisClientsOutliveAPausedServer(t *testing.T) {
	w, s := redis(t)
	for _, vip := range vips {
		c := must.Get(w.dial(vip))(t)
		defer c.Close()
		ping := func() {
			t.Helper()
			answer := make([]byte, len("+PONG\r\n"))
			if _, err := io.ReadFull(c, answer); err != nil || string(answer) != "+PONG\r\n" {
				t.Errorf("%s: %q, %v", vip, answer, err)
			}
		}
		_, _ = io.WriteString(c, "PING\r\n")
		ping()
		s.signal(syscall.SIGSTOP)
		_, _ = io.WriteString(c, "PING\r\n")
		pause(longPause() / 2)
		s.signal(syscall.SIGCONT)
		ping()
	}
}
