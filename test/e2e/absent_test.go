package e2e

import (
	"fmt"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestAbsentProcessRefusesNobody kills the process, and asks each kind of destination about which the
// table decides, before there is another process: all new connections and sessions are served, and
// leave one record each. With SLUICE_TEST_FULL=1 it is away for 10 s, with a thousand new ones a second of
// each kind: one kind of each network and family at a time, in a lab of its own, as sessions keep the
// client's ports for minutes.
func TestAbsentProcessRefusesNobody(t *testing.T) {
	t.Parallel()
	if !full() {
		// Nobody is remembered of the fresh ones, and BPF learns some moments later that the process is away.
		absent(newKinds(t), func(w *kindsLab) { w.ask(w.all(), 50) })
		return
	}
	const seconds, rate, groups = 10, 1000, 11
	for n := range groups {
		t.Run(fmt.Sprint("group=", n), func(t *testing.T) {
			w := newKinds(t)
			kinds, more := w.group(n)
			check.Equalf(t, more, n < groups-1, "there are not %d groups", groups)
			absent(w, func(w *kindsLab) {
				began := time.Now()
				w.askTogether(kinds, seconds*rate, time.Second/rate)
				t.Logf("%v: %d each in %v", kinds, seconds*rate, time.Since(began).Round(time.Millisecond))
			})
		})
	}
}

// absent kills the process, asks, and compares the next one's records with what was asked.
func absent(w *kindsLab, ask func(*kindsLab)) {
	t := w.t
	before := w.asked
	w.p.kill()
	ask(w)
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
