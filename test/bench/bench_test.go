package main

import (
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/peer"
	"github.com/sluice-proxy/sluice/test/bench/procstat"
	"github.com/sluice-proxy/sluice/test/bench/report"
	"github.com/sluice-proxy/sluice/test/check"
)

func TestFlags(t *testing.T) {
	for _, c := range []struct {
		args  string
		wrong string // part of the error; empty for none
		check func(*options) bool
	}{
		{"", "", func(o *options) bool { return o.out == "docs" && o.rounds == 9 && len(o.peers) == len(names(o)) }},
		{"-quick", "", func(o *options) bool { return o.out == "" && o.rounds == 2 && o.measure == 250*time.Millisecond }},
		{"-quick -rounds 3 -o here", "", func(o *options) bool { return o.out == "here" && o.rounds == 3 }},
		{"-peers sluice-nosplice,direct", "", func(o *options) bool { return strings.Join(names(o), " ") == "direct sluice-nosplice" && o.out == "" }},
		{"-columns rr1", "", func(o *options) bool { return len(o.columns) == 1 && o.columns[0].id == "rr1" }},
		{"-open 9000", "", func(o *options) bool { return strings.Join(names(o), " ") == "sluice" && o.out == "" }},
		{"-from x.json", "", func(o *options) bool { return o.out == "" }},
		{"-soak 1000 -peers haproxy", "", func(o *options) bool { return strings.Join(names(o), " ") == "haproxy" }},
		{"-sctp", "", func(o *options) bool {
			return o.out == "docs" && o.columnNames() == "sctp-idle,sctp-rr1,sctp-rr16,sctp-bulk" && o.peerNames() == "direct,dnat,ipvs,sluice"
		}},
		{"-sctp -columns sctp-rr1 -base x", "", func(o *options) bool { return o.out == "" && strings.HasSuffix(o.peerNames(), ",sluice-base") }},
		{"-columns sctp-rr1", `unknown column "sctp-rr1"`, nil},
		{"-peers envoy", `unknown peer "envoy": there are direct,`, nil},
		{"-columns rr2", `unknown column "rr2"`, nil},
		{"-rounds 0", "above zero", nil},
		{"-soak 5 -open 5", "one at a time", nil},
		{"more", `unknown argument "more"`, nil},
	} {
		o, err := parseFlags(strings.Fields(c.args))
		if c.wrong != "" {
			check.Errorf(t, err, c.wrong, "%s", c.args)
			continue
		}
		if err != nil || !c.check(o) {
			t.Errorf("%s: %v, %+v", c.args, err, o)
		}
	}
}

func names(o *options) []string {
	var list []string
	for _, p := range o.peers {
		list = append(list, p.Name)
	}
	return list
}

func TestParseWrk(t *testing.T) {
	rate, err := parseWrk([]byte("  8 requests in 1.00s\nRequests/sec:  61234.56\nTransfer/sec: 1MB\n"))
	if err != nil || rate != 61234.56 {
		t.Errorf("%v, %v", rate, err)
	}
	if _, err := parseWrk([]byte("unable to connect")); err == nil {
		t.Error("no rate is no error")
	}
}

func TestParseIperf(t *testing.T) {
	bits, err := parseIperf([]byte(`{"end":{"sum_received":{"bits_per_second":1.5e10}}}`))
	if err != nil || bits != 1.5e10 {
		t.Errorf("%v, %v", bits, err)
	}
	for _, text := range []string{`{"error":"unable to connect"}`, `{}`, `nothing`} {
		if _, err := parseIperf([]byte(text)); err == nil {
			t.Errorf("%s is no error", text)
		}
	}
}

func TestParseMetrics(t *testing.T) {
	m := parseMetrics("# HELP go_goroutines x\ngo_goroutines 12\nsluice_x{a=\"b\"} 3\ngo_memstats_heap_inuse_bytes 2.5e+06\n")
	if m["go_goroutines"] != 12 || m["go_memstats_heap_inuse_bytes"] != 2.5e6 || len(m) != 2 {
		t.Errorf("%v", m)
	}
}

func TestLastAgainstFirst(t *testing.T) {
	if got := lastAgainstFirst([]float64{10, 10, 7, 7, 5, 4}); got != 0.45 {
		t.Errorf("%v, want 0.45", got)
	}
	if got := lastAgainstFirst([]float64{10, 10, 1, 7, 7, 7, 9, 9, 2}); got != 0.9 {
		t.Errorf("%v, want 0.9: one slow moment at either end", got)
	}
	if !math.IsNaN(lastAgainstFirst([]float64{1, 2})) {
		t.Error("two slices have thirds")
	}
}

func TestFlat(t *testing.T) {
	samples := func(step int) []sample {
		var list []sample
		for i := range 12 {
			list = append(list, sample{holdings{procstat.Memory{RSS: 30 << 20}, 20 + i*step, 8}, 15})
		}
		return list
	}
	check.OK(t, flat(samples(0)))
	check.Errorf(t, flat(samples(5)), "descriptors", "a leak of descriptors")
	growing := samples(0)
	for i := range growing {
		growing[i].memory.RSS += int64(i) << 21
	}
	check.Errorf(t, flat(growing), "RSS", "a leak of memory")
	if flat(samples(0)[:2]) == nil {
		t.Error("two samples tell nothing")
	}
}

func TestTurns(t *testing.T) {
	for _, c := range []struct {
		times, rounds int
		want          string
	}{
		{0, 3, "xxx"}, {1, 3, "..x"}, {1, 1, "x"}, {3, 9, "..x..x..x"}, {3, 7, "..x.x.x"}, {3, 2, "xx"},
	} {
		got := ""
		for round := range c.rounds {
			if (column{times: c.times}).due(round, c.rounds) {
				got += "x"
			} else {
				got += "."
			}
		}
		check.Equalf(t, got, c.want, "%d of %d rounds", c.times, c.rounds)
	}
}

// A column's figures have rows in the table.
func TestColumnsHaveMetrics(t *testing.T) {
	columns := map[string]bool{}
	for _, m := range report.Metrics {
		id, _, _ := strings.Cut(m.ID, ".")
		columns[id] = true
	}
	for _, c := range slices.Concat(allColumns(), sctpColumns()) {
		if !columns[c.id] {
			t.Errorf("column %s has no row", c.id)
		}
	}
}

// Kernel flows are measured in every column of TCP and UDP, without the relay's flags.
func TestKernelFlowsHaveEachColumn(t *testing.T) {
	all := peer.All(peer.Builds{Sluice: "bin/sluice"})
	i := slices.IndexFunc(all, func(p peer.Peer) bool { return p.Name == "sluice-kernel" })
	if i < 0 || all[i].Extra || all[i].Variant || !all[i].Kernel {
		t.Fatalf("peer %d of %v", i, all)
	}
	for _, c := range allColumns() {
		if !concerns(c, all[i]) {
			t.Errorf("%s leaves out kernel flows", c.id)
		}
	}
}
