package demo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"
)

// journal collects the records that the proxy writes. Its methods may be called
// from any goroutine.
type journal struct {
	mu      sync.Mutex // guards what follows
	records map[key][]*record
	bad     []error
	ended   bool          // the proxy closed its log
	news    chan struct{} // closed and replaced whenever something came
	watch   func(*record) // is told of each record; may be nil
	deaf    bool          // records that come are not kept
}

func newJournal() *journal {
	return &journal{records: map[key][]*record{}, news: make(chan struct{})}
}

// line takes a line of the log.
func (j *journal) line(text string) { j.add(parseRecord([]byte(text))) }

// end says that the proxy closed its log.
func (j *journal) end() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.ended = true
	j.announceLocked()
}

func (j *journal) add(r *record, err error) {
	j.mu.Lock()
	if j.deaf {
		j.mu.Unlock()
		return
	}
	if err != nil {
		j.bad = append(j.bad, err)
	} else {
		j.records[r.key] = append(j.records[r.key], r)
	}
	watch := j.watch
	j.announceLocked()
	j.mu.Unlock()
	if watch != nil && err == nil {
		watch(r)
	}
}

func (j *journal) announceLocked() {
	close(j.news)
	j.news = make(chan struct{})
}

// forget keeps no record that comes from now on.
func (j *journal) forget() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.deaf = true
}

// follow tells f of each record that comes from now on.
func (j *journal) follow(f func(*record)) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.watch = f
}

// errNotYet is what a condition gives while it has to be waited for.
var errNotYet = errors.New("not yet")

// await waits until the condition gives something else than errNotYet. The
// condition is called with the journal locked, each time something came.
func (j *journal) await(ctx context.Context, within time.Duration, condition func() error) error {
	deadline := time.After(within)
	for {
		j.mu.Lock()
		err, news, ended := condition(), j.news, j.ended
		j.mu.Unlock()
		if !errors.Is(err, errNotYet) {
			return err
		}
		if ended {
			return errors.New("the log has ended")
		}
		select {
		case <-news:
		case <-deadline:
			return fmt.Errorf("not within %v", within)
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// recordsOf waits until each of the connections has a record and returns them in
// the same order. More than one for a connection is an error.
func (j *journal) recordsOf(ctx context.Context, keys []key, within time.Duration) ([]*record, error) {
	var missing key
	found := make([]*record, len(keys))
	err := j.await(ctx, within, func() error {
		for i, k := range keys {
			switch list := j.records[k]; len(list) {
			case 0:
				missing = k
				return errNotYet
			case 1:
				found[i] = list[0]
			default:
				return fmt.Errorf("%d records of the connection %s to %s", len(list), k.client, k.vip)
			}
		}
		return nil
	})
	if err != nil && missing != (key{}) {
		err = fmt.Errorf("no record of the connection %s to %s: %w", missing.client, missing.vip, err)
	}
	return found, err
}

// retried reports whether a record of the connection says that an endpoint did
// not answer.
func (j *journal) retried(k key) bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.ContainsFunc(j.records[k], (*record).retried)
}

// size returns the number of records that have come.
func (j *journal) size() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := 0
	for _, list := range j.records {
		n += len(list)
	}
	return n
}

// audit compares what has come with the connections that there were: exactly
// one record for each, none of anything else, each readable.
func (j *journal) audit(keys []key) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	all := slices.Clone(j.bad)
	wanted := make(map[key]bool, len(keys))
	for _, k := range keys {
		wanted[k] = true
		if n := len(j.records[k]); n != 1 {
			all = append(all, fmt.Errorf("%d records of the connection %s to %s", n, k.client, k.vip))
		}
	}
	for k, list := range j.records {
		if !wanted[k] {
			all = append(all, fmt.Errorf("%d records of a connection that nobody made: %s to %s", len(list), k.client, k.vip))
		}
	}
	return errors.Join(all...)
}
