package e2e

import (
	"fmt"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The metrics that the tests read.
const (
	metricPorts    = "sluice_service_ports"
	metricOpen     = "sluice_connections_active"
	metricDialing  = "sluice_connections_dialing"
	metricPipes    = "sluice_relay_pipes"
	metricMisused  = "sluice_records_misused_total"
	metricDropped  = "sluice_records_dropped_total"
	metricPauses   = "sluice_accept_pauses_total"
	metricRoutines = "go_goroutines"
)

// residue is what connections could leave in the proxy.
type residue struct {
	open, dialing int // table entries
	goroutines    int
	descriptors   int // without two for each pooled pipe
	pipes         int // pooled
}

func (r residue) String() string {
	return fmt.Sprintf("%d open, %d dialling, %d goroutines, %d descriptors and %d pooled pipes",
		r.open, r.dialing, r.goroutines, r.descriptors, r.pipes)
}

// residue reads the current values.
func (p *proxy) residue() (residue, error) {
	m, err := p.metrics()
	if err != nil {
		return residue{}, err
	}
	for _, name := range []string{metricMisused, metricDropped} {
		check.Equalf(p.t, m[name], 0, "%s is", name)
	}
	pipes := int(m[metricPipes])
	return residue{
		open: int(m[metricOpen]), dialing: int(m[metricDialing]), goroutines: int(m[metricRoutines]),
		descriptors: p.descriptors() - 2*pipes, pipes: pipes,
	}, nil
}

// awaitOpen waits until exactly so many connections are open: those that clients have closed
// end a moment later.
func (p *proxy) awaitOpen(n int) {
	p.t.Helper()
	p.awaitMetrics(fmt.Sprintf("%d connections are open", n), func(m map[string]float64) bool { return m[metricOpen] == float64(n) })
}

// settle waits until no connection is open, and returns what remains. With limit
// it also waits until no more than that remains, apart from pooled pipes.
func (p *proxy) settle(limit *residue) residue {
	p.t.Helper()
	var now residue
	wait.For(p.t, "all connections are gone without a trace", 20*time.Second, func() (err error) {
		if now, err = p.residue(); err != nil {
			return err
		}
		if now.open != 0 || now.dialing != 0 {
			return fmt.Errorf("there is %v", now)
		}
		if limit != nil && (now.goroutines > limit.goroutines || now.descriptors > limit.descriptors) {
			return fmt.Errorf("there was %v, now there is %v", *limit, now)
		}
		return nil
	})
	return now
}
