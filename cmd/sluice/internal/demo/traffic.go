package demo

import (
	"context"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// streamPath is where backends send until the client closes.
const streamPath = "/stream"

// stream sends a few KiB now and then.
func stream(w http.ResponseWriter, r *http.Request) {
	control := http.NewResponseController(w)
	beat := time.NewTicker(200 * time.Millisecond)
	defer beat.Stop()
	block := make([]byte, 16<<10)
	for {
		if _, err := w.Write(block[:1<<10+rand.IntN(15<<10)]); err != nil || control.Flush() != nil {
			return
		}
		select {
		case <-beat.C:
		case <-r.Context().Done():
			return
		}
	}
}

// traffic has the clients ask, until ctx ends: short connections to all services, more
// and fewer in turns, and for each client one that lasts.
func (s *show) traffic(ctx context.Context) {
	var all sync.WaitGroup
	defer all.Wait()
	for i := range clientCount {
		all.Go(func() { s.askOften(ctx, i) })
		all.Go(func() { s.listen(ctx, i) })
	}
}

// wave is how long it takes from much traffic to much traffic again.
const wave = 2 * time.Minute

// askOften makes short connections.
func (s *show) askOften(ctx context.Context, client int) {
	began := time.Now().Add(-time.Duration(client) * wave / (3 * clientCount))
	// web is asked most.
	weights := []int{0, 0, 0, 0, 1, 1, 1, 2, 2, 3}
	for {
		svc := s.services[weights[rand.IntN(len(weights))]]
		if c, err := s.world.call(ctx, client, svc, s.familyOf(rand.IntN(clientCount))); err == nil {
			_, _ = c.ask() // the page shows what went wrong
			c.hangUp()
		}
		phase := 2 * math.Pi * float64(time.Since(began)) / float64(wave)
		pause := time.Duration((350 + 250*math.Cos(phase)) * (0.5 + rand.Float64()) * float64(time.Millisecond))
		if !rest(ctx, pause) {
			return
		}
	}
}

// listen holds connections on which a backend sends.
func (s *show) listen(ctx context.Context, client int) {
	for rest(ctx, time.Duration(1+rand.IntN(4))*time.Second) {
		f := v4
		if client == 1 {
			f = s.world.second()
		}
		s.hear(ctx, client, s.services[client%3], f, time.Duration(8+rand.IntN(30))*time.Second)
	}
}

// hear reads what a backend sends, for a time.
func (s *show) hear(ctx context.Context, client int, svc *shopService, f service.Family, duration time.Duration) {
	c, err := s.world.call(ctx, client, svc, f)
	if err != nil {
		return
	}
	defer c.hangUp()
	stop := context.AfterFunc(ctx, c.hangUp)
	defer stop()
	_ = c.conn.SetDeadline(time.Now().Add(duration))
	if _, err := fmt.Fprintf(c.conn, "GET %s HTTP/1.1\r\nHost: %s.%s\r\n\r\n", streamPath, svc.name, manifestNamespace); err == nil {
		_, _ = io.Copy(io.Discard, c.in) // ends at the deadline
	}
}

// rest waits, and reports whether ctx goes on.
func rest(ctx context.Context, pause time.Duration) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
