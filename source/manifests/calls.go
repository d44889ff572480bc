package manifests

import (
	"errors"
	"sync"
	"time"
)

const (
	// filePatience bounds reading a file or following a symlink: a network file
	// system may never answer.
	filePatience = 5 * time.Second
	// maxHanging is how many calls may hang at once. Each has a thread.
	maxHanging = 16
)

var errHangs = errors.New("cannot be read: its file system does not answer")

// calls bounds the time of file system calls. The zero value waits for
// filePatience.
type calls struct {
	limit time.Duration

	mu      sync.Mutex
	hanging map[string]bool // guarded by mu: files with a call that was given up
}

// within returns the result of f, or errHangs if f takes too long. f then continues,
// and until it ends, further calls for the same file fail at once.
func within[T any](p *calls, name string, f func() T) (result T, err error) {
	p.mu.Lock()
	hangs := p.hanging[name] || len(p.hanging) >= maxHanging
	p.mu.Unlock()
	if hangs {
		return result, errHangs
	}
	limit := p.limit
	if limit == 0 {
		limit = filePatience
	}
	done := make(chan T, 1)
	go func() { done <- f() }()
	select {
	case result = <-done:
		return result, nil
	case <-time.After(limit):
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.hanging == nil {
		p.hanging = make(map[string]bool)
	}
	p.hanging[name] = true
	go func() {
		<-done
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.hanging, name)
	}()
	return result, errHangs
}
