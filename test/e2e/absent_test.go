package e2e

import (
	"fmt"
	"slices"
	"testing"
)

// TestAbsentProcessRefusesNobody kills the process, and asks each kind of destination about which the
// table decides, before there is another process: all new connections and sessions are served, and
// leave one record each.
func TestAbsentProcessRefusesNobody(t *testing.T) {
	t.Parallel()
	each := 50
	if full() {
		each = 1000
	}
	w := newKinds(t)
	before := w.asked
	w.p.kill()
	// Nobody is remembered of the fresh ones, and BPF learns some moments later that the process is away.
	w.ask(slices.Concat(w.fresh, w.kinds), each)
	next := *w.p
	next.start("--datapath", "kernel", "--access-log-udp", "all", "--keep-flows", "never")
	next.stop()
	// Lost are the records of what ended in the last moment of the first process.
	clients := make(map[string]int)
	records := next.records()
	for _, r := range records {
		if clients[fmt.Sprint(r.Protocol, r.Client, r.VIP)]++; clients[fmt.Sprint(r.Protocol, r.Client, r.VIP)] > 1 {
			t.Errorf("%s has another record: %+v", r.Client, r)
		}
	}
	if n := len(records); n > w.asked || n < w.asked-before {
		t.Errorf("%d records of %d connections and sessions, of which %d began without a process", n, w.asked, w.asked-before)
	}
}
