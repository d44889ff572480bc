package conntrack

import (
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestTotalsAreCarried: another process's totals are this one's plus those told, each told once, also
// of service ports that are removed.
func TestTotalsAreCarried(t *testing.T) {
	from, to := NewTable(Options{Shards: 1}), NewTable(Options{Shards: 1})
	names := []service.PortName{{Port: "a"}, {Port: "b"}, {Port: "gone"}}
	count := func(table *Table, name service.PortName, n uint64) {
		c := table.Counters(name)
		c.opened.Add(n)
		c.active.Add(3)
		c.datagrams[1].Add(2 * n)
		c.bytesFromClient.Add(3 * n)
		c.outcome().ended[ClientFin].Add(n)
		c.outcome().failed[DialRefused].Add(n)
		c.outcome().connect.observe(1, int64(time.Millisecond))
	}
	tell := func() {
		t.Helper()
		p, err := json.Marshal(from.MovedTotals())
		must.OK(t, err)
		var list []MovedTotals
		must.OK(t, json.Unmarshal(p, &list))
		to.Carry(list)
	}
	var want Totals
	for round := range uint64(4) {
		for _, name := range names {
			count(from, name, 10+round)
			if name.Port != "gone" {
				count(to, name, 1)
			}
		}
		if round == 2 {
			from.Counters(names[2]).active.Store(0)
			from.Forget(names[2])
		}
		tell()
		tell()
		_, a := from.Totals()
		_, b := to.Totals()
		a.Active, b.Active = 0, 0
		want = a
		own := Totals{Opened: 2 * (round + 1), DatagramsFromEndpoint: 4 * (round + 1), BytesFromClient: 6 * (round + 1)}
		own.Ended[ClientFin], own.Failed[DialRefused] = 2*(round+1), 2*(round+1)
		want.Add(&own)
		want.Connect, b.Connect = Histogram{}, Histogram{}
		check.Equalf(t, b, want, "round %d: the totals", round)
	}
	ports, _ := to.Totals()
	if got, want := ports[0].Totals.Opened, uint64(10+11+12+13+4); got != want || ports[0].Totals.Active != 12 {
		t.Errorf("%d opened, %d active, want %d and the 12 here", got, ports[0].Totals.Active, want)
	}
	if n := ports[0].Totals.Connect; n.Buckets[3] != 8 || n.Sum != 8*time.Millisecond || fmt.Sprint(n.Native) != "&{[{-79 8}]}" {
		t.Errorf("durations: %+v, %v", n, n.Native)
	}
	if _, all := to.Totals(); fmt.Sprint(all.Connect.Native) != "&{[{-79 20}]}" {
		t.Errorf("durations of all: %v", all.Connect.Native)
	}
}

// A process that has no native histograms tells buckets alone: their durations count where the buckets
// end, as all of a histogram's have to.
func TestHistogramsOfAnOlderProcess(t *testing.T) {
	table := NewTable(Options{Shards: 1})
	name := portName("web")
	table.Counters(name)
	m := MovedTotals{Port: name}
	m.Totals.Connect.Buckets[3], m.Totals.Connect.Buckets[bucketCount] = 2, 3
	table.Carry([]MovedTotals{m})
	ports, _ := table.Totals()
	check.Equal(t, fmt.Sprint(ports[0].Totals.Connect.Native), "&{[{-79 2} {19 3}]}") // 1 ms, 5 s
}
