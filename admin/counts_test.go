package admin

import (
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// TestMetricsOf: each kind of field that a Stats has is read at each scrape.
func TestMetricsOf(t *testing.T) {
	type pins struct {
		Pins int `metric:"pins" help:"Pins."`
	}
	type counts struct {
		Open   int64          `metric:"open" help:"Open."`
		Lost   uint64         `metric:"lost_total" help:"Lost."`
		Polls  bool           `metric:"polls" help:"Polls."`
		Passed map[string]int `metric:"passed" help:"Passed."`
		Paused atomic.Uint64  `metric:"paused_total" help:"Paused."`
		Level  atomic.Int64   `metric:"level" help:"Level."`
		Own    int            // no metric
		Pins   pins
	}
	c := &counts{Open: -1, Lost: 2, Polls: true, Passed: map[string]int{"a": 1, "b": 3}, Own: 100, Pins: pins{7}}
	list := MetricsOf(func() *counts { return c })
	c.Paused.Store(5)
	c.Level.Store(-6)
	want := []struct {
		name, help string
		value      float64
	}{{"open", "Open.", -1}, {"lost_total", "Lost.", 2}, {"polls", "Polls.", 1}, {"passed", "Passed.", 4},
		{"paused_total", "Paused.", 5}, {"level", "Level.", -6}, {"pins", "Pins.", 7}}
	must.Equalf(t, len(list), len(want), "metrics")
	for i, w := range want {
		if m := list[i]; m.Name != w.name || m.Help != w.help || m.Value() != w.value {
			t.Errorf("%s (%s) is %v, want %+v", m.Name, m.Help, m.Value(), w)
		}
	}
	byValue := MetricsOf(func() pins { return pins{Pins: int(c.Lost)} })
	if c.Lost = 9; len(byValue) != 1 || byValue[0].Value() != 9 {
		t.Errorf("by value: %+v", byValue)
	}
}
