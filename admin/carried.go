package admin

import (
	"fmt"
	"maps"
	"strings"
	"sync"
)

// Carried has the totals of metrics go on where those of the processes before have ended. The zero
// value carries nothing. It is safe for concurrent use.
type Carried struct {
	mu     sync.Mutex
	own    map[string]func() float64 // by name and labels
	before map[string]float64
}

// Totals returns the totals of this process and those before, by name and labels.
func (c *Carried) Totals() map[string]float64 {
	c.mu.Lock()
	own, totals := maps.Clone(c.own), make(map[string]float64)
	maps.Copy(totals, c.before)
	c.mu.Unlock()
	for key, value := range own {
		totals[key] += value()
	}
	return totals
}

// Carry replaces the totals of the processes before.
func (c *Carried) Carry(totals map[string]float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.before = totals
}

// include has a metric go on, if it is a total.
func (c *Carried) include(m *Metric) {
	if !m.isTotal() {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.own == nil {
		c.own = make(map[string]func() float64)
	}
	key, value := fmt.Sprint(m.Name, m.Labels), m.Value
	c.own[key] = value
	m.Value = func() float64 {
		now := value()
		c.mu.Lock()
		defer c.mu.Unlock()
		return c.before[key] + now
	}
}

func (m *Metric) isTotal() bool { return strings.HasSuffix(m.Name, "_total") && m.Name != noLocal }
