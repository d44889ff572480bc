package live

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
)

const (
	// tick is the least time between two looks at the open connections, which are at
	// the end of each Meter's interval.
	tick = time.Second
	// rest is how much longer than a look the pause after it is: with very many
	// connections, looks are rarer.
	rest = 30
	// maxMeters bounds the meters of a View.
	maxMeters = 32
)

// ErrTooManyMeters is returned by View.Meter.
var ErrTooManyMeters = errors.New("too many streams of rates are open")

// meters feed the Meters of a View from one tap and one look for all of them. Their
// goroutines run while there are any.
type meters struct {
	view *View

	mu   sync.Mutex
	all  map[*Meter]struct{}
	stop context.CancelFunc // nil while all is empty
	done chan struct{}      // closed when the goroutines that were started last are over
}

// Meter begins to measure. The caller must Close the Meter.
func (v *View) Meter(o MeterOptions) (*Meter, error) {
	m := &Meter{options: o, view: v, wake: make(chan struct{}, 1), groups: make(map[Key]*Group), began: time.Now()}
	s := &v.meters
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) >= maxMeters {
		return nil, ErrTooManyMeters
	}
	if s.stop == nil {
		tap, err := v.Tap(conntrack.TapOptions{Opens: true})
		if err != nil {
			return nil, err
		}
		ctx, stop := context.WithCancel(context.Background())
		before, done := s.done, make(chan struct{})
		s.stop, s.done = stop, done
		s.all = make(map[*Meter]struct{})
		go func() {
			defer close(done)
			if before != nil {
				<-before // the looks before must be over; they may wait for s.mu
			}
			s.run(ctx, tap)
		}()
	}
	s.all[m] = struct{}{}
	return m, nil
}

// Close ends the Meter.
func (m *Meter) Close() {
	s := &m.view.meters
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.all, m)
	if len(s.all) == 0 && s.stop != nil {
		s.stop()
		s.stop = nil
	}
}

// Next waits for a frame. It returns ctx.Err() when ctx ends.
func (m *Meter) Next(ctx context.Context) (*Frame, error) {
	for {
		if f := m.take(); f != nil {
			return f, nil
		}
		select {
		case <-m.wake:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// current returns the Meters of now.
func (s *meters) current() []*Meter {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.all))
}

// run feeds the Meters until ctx ends.
func (s *meters) run(ctx context.Context, tap *conntrack.Tap) {
	defer tap.Close()
	since := poll.Nanotime()
	var lost uint64 // guarded by reading, like the tap
	var reading sync.Mutex
	go func() {
		buf := make([]conntrack.Record, 256)
		for {
			n, missed, err := tap.Next(ctx, buf)
			if err != nil {
				return
			}
			reading.Lock()
			lost += missed
			reading.Unlock()
			all := s.current()
			for i := range buf[:n] {
				s.feed(all, &buf[i], since)
			}
			clear(buf[:n])
		}
	}()
	timer := time.NewTimer(0)
	defer timer.Stop()
	looked := false // the first look is for the bytes of connections that are open
	for {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return
		}
		began := time.Now()
		all := s.current()
		if looked && !slices.ContainsFunc(all, func(m *Meter) bool { return m.isDue(began) }) {
			timer.Reset(tick)
			continue
		}
		for _, m := range all {
			m.beginLook()
		}
		if err := s.look(ctx, all, since); err != nil {
			return // the loops have stopped
		}
		looked = true
		reading.Lock()
		missed := lost
		lost = 0
		reading.Unlock()
		now := time.Now()
		for _, m := range all {
			m.endInterval(now, missed)
		}
		took := now.Sub(began)
		timer.Reset(max(tick-took, rest*took))
	}
}

// look feeds the open connections.
func (s *meters) look(ctx context.Context, all []*Meter, since int64) error {
	v := s.view
	if err := v.begin(ctx); err != nil {
		return err
	}
	defer v.end()
	return v.table.Look(ctx, v.post, poll.Nanotime(), func(r *conntrack.Record) error {
		s.feed(all, r, since)
		return nil
	})
}

// feed passes a record to all Meters, with the bytes since its last look. The bytes
// of a connection that was open before the first look are not known.
func (s *meters) feed(all []*Meter, r *conntrack.Record, since int64) {
	var fromClient, fromEndpoint uint64
	if r.Event != conntrack.Opened {
		lookedClient, lookedEndpoint, at := r.Looked()
		switch {
		case at >= since:
			fromClient, fromEndpoint = r.BytesFromClient-lookedClient, r.BytesFromEndpoint-lookedEndpoint
		case r.Start >= since:
			fromClient, fromEndpoint = r.BytesFromClient, r.BytesFromEndpoint
		}
	}
	for _, m := range all {
		m.sample(r, fromClient, fromEndpoint)
	}
}
