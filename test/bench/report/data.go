// Package report turns the benchmark's figures into medians and ratios, a Markdown
// page, JSON, and a chart. It uses no files, no clock and no network.
package report

import (
	"math"
	"slices"
	"time"
)

// Data are the results of one run of the benchmark.
type Data struct {
	Environment Environment
	Peers       []Peer
	Rounds      int
	Seconds     float64  // length of one measurement
	Notes       []string // what went wrong, and other remarks
	Samples     []Sample
}

// Environment is where the benchmark ran.
type Environment struct {
	Date         time.Time `json:"date"`
	Kernel       string    `json:"kernel"`
	Architecture string    `json:"architecture"`
	CPU          string    `json:"cpu"`
	CPUs         int       `json:"cpus"`
	Go           string    `json:"go"`
	Congestion   string    `json:"congestion_control"` // of TCP
	Commit       string    `json:"commit,omitempty"`
	IPVersion    int       `json:"ip_version"`
	StealPercent float64   `json:"steal_percent"` // of the time of all cores, over the whole run
}

// Peer is one of those compared.
type Peer struct {
	Name    string `json:"name"`
	About   string `json:"about"`
	Version string `json:"version,omitempty"`
	Missing string `json:"missing,omitempty"` // why it did not run
	// Variant marks other flags of Sluice, or another build: variants have their
	// own table and no bars in the chart.
	Variant bool `json:"variant,omitempty"`
}

// Sample is one figure of one round.
type Sample struct {
	Round  int // from 0
	Peer   string
	Metric string
	Value  float64
}

// Add keeps a figure, unless it is not a number.
func (d *Data) Add(round int, peer, metric string, value float64) {
	if math.IsNaN(value) || math.IsInf(value, 0) {
		return
	}
	d.Samples = append(d.Samples, Sample{round, peer, metric, value})
}

// has reports whether any peer has figures of a metric.
func (d *Data) has(metric string) bool {
	return slices.ContainsFunc(d.Samples, func(s Sample) bool { return s.Metric == metric })
}

// Series returns a metric's figures of one peer, by round; NaN for a round without
// one.
func (d *Data) Series(peer, metric string) []float64 {
	var series []float64
	for _, s := range d.Samples {
		if s.Peer != peer || s.Metric != metric {
			continue
		}
		for len(series) <= s.Round {
			series = append(series, math.NaN())
		}
		series[s.Round] = s.Value
	}
	return series
}

// Spread is the median of a metric's figures over the rounds, and their
// quartiles: half of the rounds lie between Low and High.
type Spread struct{ Median, Low, High float64 }

// Spread summarises a series; ok is false without figures.
func (d *Data) Spread(peer, metric string) (s Spread, ok bool) {
	return spread(d.Series(peer, metric))
}

// Ratio summarises, over the rounds, a peer's figure divided by another peer's
// figure of the same round. A disturbance of the machine affects both, so this is
// steadier than the quotient of two medians.
func (d *Data) Ratio(peer, base, metric string) (s Spread, ok bool) {
	a, b := d.Series(peer, metric), d.Series(base, metric)
	var quotients []float64
	for i := range min(len(a), len(b)) {
		if q := a[i] / b[i]; !math.IsInf(q, 0) {
			quotients = append(quotients, q)
		}
	}
	return spread(quotients)
}

func spread(series []float64) (Spread, bool) {
	values := slices.DeleteFunc(slices.Clone(series), math.IsNaN)
	if len(values) == 0 {
		return Spread{}, false
	}
	slices.Sort(values)
	return Spread{quantile(values, .5), quantile(values, .25), quantile(values, .75)}, true
}

// quantile returns the figure below which a share q of the sorted values lies,
// with linear interpolation.
func quantile(sorted []float64, q float64) float64 {
	at := q * float64(len(sorted)-1)
	i := int(at)
	if i == len(sorted)-1 {
		return sorted[i]
	}
	return sorted[i] + (at-float64(i))*(sorted[i+1]-sorted[i])
}
