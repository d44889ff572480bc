package conntrack

import (
	"maps"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// MovedTotals are totals of a service port, or of all that were removed, on their way to the process
// that takes over. Both count in the same buckets.
type MovedTotals struct {
	Port     service.PortName
	Totals   Totals
	Ended    map[string]uint64 `json:",omitempty"`
	Failures map[string]uint64 `json:",omitempty"`
}

// MovedTotals returns what has been counted since the last call. It belongs to one goroutine.
func (t *Table) MovedTotals() (list []MovedTotals) {
	ports, all := t.Totals()
	now := make(map[service.PortName]Totals, len(ports)+1)
	for i := range ports {
		now[ports[i].Name] = ports[i].Totals
		all.addTimes(&ports[i].Totals, -1)
	}
	now[service.PortName{}] = all // of removed ports
	for name, totals := range t.told {
		if _, stays := now[name]; !stays { // it is among those of removed ports now
			removed := now[service.PortName{}]
			removed.addTimes(&totals, -1)
			now[service.PortName{}], now[name] = removed, totals
		}
	}
	for name, totals := range now {
		more, told := totals, t.told[name]
		more.addTimes(&told, -1)
		more.Active = 0
		if more == (Totals{}) {
			continue
		}
		m := MovedTotals{Port: name, Totals: more, Ended: make(map[string]uint64), Failures: make(map[string]uint64)}
		for _, e := range Ends() {
			m.Ended[e.String()] = more.Ended[e]
		}
		for _, e := range DialErrors() {
			m.Failures[e.String()] = more.Failed[e]
		}
		for _, counts := range []map[string]uint64{m.Ended, m.Failures} {
			maps.DeleteFunc(counts, func(_ string, n uint64) bool { return n == 0 })
		}
		list = append(list, m)
	}
	t.told = now
	return list
}

// Carry counts what another process has counted. It is safe for concurrent use.
func (t *Table) Carry(list []MovedTotals) {
	g := &t.registry
	g.mu.Lock()
	defer g.mu.Unlock()
	for i := range list {
		m := &list[i]
		for _, e := range Ends() {
			m.Totals.Ended[e] = m.Ended[e.String()]
		}
		for _, e := range DialErrors() {
			m.Totals.Failed[e] = m.Failures[e.String()]
		}
		m.Totals.Connect.complete(&ConnectBuckets)
		m.Totals.FirstByte.complete(&FirstByteBuckets)
		m.Totals.Duration.complete(&DurationBuckets)
		if c := g.ports[m.Port]; c != nil {
			c.add(&m.Totals)
		} else {
			g.retired.Add(&m.Totals)
		}
	}
}

// add counts what another process has counted of the service port.
func (c *Counters) add(t *Totals) {
	c.opened.Add(t.Opened)
	c.retried.Add(t.Retried)
	c.attempts.Add(t.Attempts)
	c.bytesFromClient.Add(t.BytesFromClient)
	c.bytesFromEndpoint.Add(t.BytesFromEndpoint)
	c.datagrams[0].Add(t.DatagramsFromClient)
	c.datagrams[1].Add(t.DatagramsFromEndpoint)
	o := c.outcome()
	for i, n := range t.Ended {
		o.ended[i].Add(n)
	}
	for i, n := range t.Failed {
		o.failed[i].Add(n)
	}
	o.connect.add(&t.Connect)
	o.firstByte.add(&t.FirstByte)
	o.duration.add(&t.Duration)
}

// complete counts where its buckets end what a process without native histograms has told.
func (h *Histogram) complete(bounds *[bucketCount]time.Duration) {
	if h.Native != nil {
		return
	}
	var counts [nativeCount]uint64
	for i, n := range h.Buckets {
		counts[nativeBucket(int64(bounds[min(i, bucketCount-1)]))] += n
	}
	h.Native = newNative(&counts)
}

func (h *histogram) add(o *Histogram) {
	o.Native.each(h.native.add)
	for i, n := range o.Buckets {
		h.buckets[i].Add(n)
	}
	h.sum.Add(int64(o.Sum))
}
