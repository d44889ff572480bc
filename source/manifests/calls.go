package manifests

import (
	"errors"
	"sync"
	"time"
)

const (
	// filePatience is how long a file may take to be read, or a symlink to be
	// followed: a network's file system may never answer.
	filePatience = 5 * time.Second
	// maxHanging is how many calls may hang at once. Each has a thread.
	maxHanging = 16
)

var errHangs = errors.New("cannot be read: its file system does not answer")

// calls bounds the time of calls about files. The zero value waits for
// filePatience.
type calls struct {
	limit time.Duration

	mu      sync.Mutex
	hanging map[string]bool // guarded by mu: files with a call that was given up
}

// within gives what f gives, or errHangs if that takes too long. f goes on then,
// and until it ends, later calls about the same file fail at once.
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
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case result = <-done:
		return result, nil
	case <-timer.C:
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
