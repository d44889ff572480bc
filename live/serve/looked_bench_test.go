package serve

import (
	"context"
	"io"
	"net/http"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

// BenchmarkLookedAt opens and ends connections, 10,000 a second, beside 9,000 open
// ones, and measures what they cost this process while somebody looks: cpu-us/conn is
// the time of all threads for each connection.
func BenchmarkLookedAt(b *testing.B) {
	for name, paths := range map[string][]string{
		"nobody":   nil,
		"rates":    {"/v1/rates"},
		"map":      {"/v1/rates?by=client,service,endpoint&limit=1000"},
		"tap":      {"/v1/tap?opens=true"},
		"tap-rate": {"/v1/tap?opens=true&rate=100"},
		"history":  {"/v1/history"},
	} {
		b.Run(name, func(b *testing.B) { lookedAt(b, paths) })
	}
}

func lookedAt(b *testing.B, paths []string) {
	const open, burst, pause = 9000, 100, 10 * time.Millisecond
	s := newSite(b)
	ep := &service.Endpoint{}
	begin := func(r *conntrack.Record) {
		*r = conntrack.Record{Port: s.port, Protocol: service.TCP, Start: poll.Nanotime()}
		s.shard.Open(r)
		r.BeginAttempt(ep, r.Start)
		r.AttemptSucceeded(r.Start + 1000)
	}
	held := make([]conntrack.Record, open)
	s.on(func() {
		for i := range held {
			begin(&held[i])
		}
		s.shard.Flush()
	})
	ctx, stop := context.WithCancel(context.Background())
	var reading sync.WaitGroup
	for _, path := range paths {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.url+path, http.NoBody)
		must.OK(b, err)
		resp, err := s.client.Do(req)
		if err != nil || resp.StatusCode != http.StatusOK {
			b.Fatalf("%s: %v %v", path, resp, err)
		}
		reading.Go(func() {
			_, _ = io.Copy(io.Discard, resp.Body) // until the end of ctx
			_ = resp.Body.Close()
		})
	}
	cpu := func() int64 {
		var u unix.Rusage
		must.OK(b, unix.Getrusage(unix.RUSAGE_SELF, &u))
		return u.Utime.Nano() + u.Stime.Nano()
	}
	records := make([]conntrack.Record, burst)
	b.ResetTimer()
	before := cpu()
	for range b.N {
		s.on(func() {
			for i := range records {
				begin(&records[i])
				records[i].End = conntrack.ClientFin
				s.shard.Close(&records[i])
			}
			s.shard.Flush()
		})
		time.Sleep(pause)
	}
	b.ReportMetric(float64(cpu()-before)/1000/float64(b.N*burst), "cpu-us/conn")
	stop()
	reading.Wait()
}
