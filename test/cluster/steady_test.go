//go:build cluster

package cluster

import (
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
)

// steady is a set of clients of an address that run while a test does something
// else: some keep a connection busy, others make one connection after the other.
type steady struct {
	w       *world
	address string
	stop    chan struct{}
	done    sync.WaitGroup

	mu       sync.Mutex
	served   []string // names who served new connections, in order, without repetitions
	attempts int
	errors   []error
	conns    []net.Conn // those of before
}

const (
	// heartbeat is the interval between uses of a connection and between new
	// connections.
	heartbeat = 10 * time.Millisecond
	// answer bounds a client's wait: no answer is an error, a slow one on a busy
	// machine is not.
	answer = 20 * time.Second
)

// watch starts clients outside, in a pod and on the node, and waits until a new connection
// was served.
func (w *world) watch(address string) *steady {
	w.t.Helper()
	s := &steady{w: w, address: address, stop: make(chan struct{})}
	for _, from := range []*netns.Host{w.hosts.Outside, w.hosts.Pods[1], w.hosts.Node} {
		c, err := from.Dial("tcp", address)
		if err == nil {
			_, err = netns.AskOn(c)
		}
		if err != nil {
			w.t.Fatalf("%s from %s: %v", address, from.Name(), err)
		}
		s.conns = append(s.conns, c)
		s.run(func() error { return s.exchange(c) })
	}
	s.run(s.connect)
	w.t.Cleanup(s.end) // also if the test fails
	w.until("a new connection is served", func() error {
		if s.names() == "" {
			return errNotYet
		}
		return nil
	})
	return s
}

// run repeats something until the end, or until it fails.
func (s *steady) run(f func() error) {
	s.done.Add(1)
	go func() {
		defer s.done.Done()
		beat := time.NewTicker(heartbeat)
		defer beat.Stop()
		for {
			if err := f(); err != nil {
				s.note(err)
				return
			}
			select {
			case <-beat.C:
			case <-s.stop:
				return
			}
		}
	}()
}

func (s *steady) note(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.errors = append(s.errors, err)
}

// exchange sends a line over a connection and reads it back.
func (s *steady) exchange(c net.Conn) error {
	const line = "still there\n"
	_ = c.SetDeadline(time.Now().Add(answer))
	if _, err := io.WriteString(c, line); err != nil {
		return fmt.Errorf("a connection of before: %w", err)
	}
	buffer := make([]byte, len(line))
	if _, err := io.ReadFull(c, buffer); err != nil {
		return fmt.Errorf("a connection of before: %w", err)
	}
	if string(buffer) != line {
		return fmt.Errorf("a connection of before: %q came back", buffer)
	}
	return nil
}

// connect makes a new connection and notes who serves it.
func (s *steady) connect() error {
	name, err := askWithin(answer, s.w.hosts.Outside, "tcp", s.address)
	if err != nil {
		return fmt.Errorf("a new connection: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.attempts++
	if n := len(s.served); n == 0 || s.served[n-1] != name {
		s.served = append(s.served, name)
	}
	return nil
}

// names lists who served new connections so far, in order.
func (s *steady) names() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.served, " ")
}

// finish ends all clients. None of them may have got an error, and these servers
// must have served new connections, one after the other.
func (s *steady) finish(want string) {
	s.w.t.Helper()
	s.end()
	if err := errors.Join(s.errors...); err != nil {
		s.w.t.Errorf("%s: %v", s.address, err)
	}
	check.Equalf(s.w.t, s.names(), want, "%s: new connections were served, one after the other, by", s.address)
	s.w.t.Logf("%s: %d new connections", s.address, s.attempts)
}

func (s *steady) end() {
	select {
	case <-s.stop:
	default:
		close(s.stop)
	}
	s.done.Wait()
}

// close closes the connections of before, after the end.
func (s *steady) close() {
	for _, c := range s.conns {
		_ = c.Close()
	}
}
