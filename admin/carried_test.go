package admin

import (
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/check"
)

// TestTotalsGoOn: totals, with their labels, are those of this process and of the ones before; gauges
// are this one's.
func TestTotalsGoOn(t *testing.T) {
	var before, next Carried
	of := func(c *Carried, n float64) Sources {
		value := func() float64 { return n }
		return Sources{Table: conntrack.NewTable(conntrack.Options{Shards: 1}), Carried: c, Metrics: []Metric{
			NewMetric("test_total", "t", value), NewMetric("test_open", "o", value), {"labelled_total", "l", value, map[string]string{"code": "200"}},
		}}
	}
	NewRegistry(of(&before, 5))
	registry := NewRegistry(of(&next, 2))
	before.Carry(map[string]float64{"test_total": 1})
	next.Carry(before.Totals())
	next.Carry(next.before) // told again
	want := `# HELP labelled_total l
# TYPE labelled_total counter
labelled_total{code="200"} 7
# HELP test_open o
# TYPE test_open gauge
test_open 2
# HELP test_total t
# TYPE test_total counter
test_total 7
`
	check.OK(t, testutil.GatherAndCompare(registry, strings.NewReader(want), "test_total", "test_open", "labelled_total"))
}
