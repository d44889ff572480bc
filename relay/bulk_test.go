package relay

import (
	"testing"
	"time"
)

// deliver sends so much from a side, and has the other read it.
func (p *play) deliver(side, bytes int) {
	for end := p.socks[side].sent + bytes; p.socks[side].sent < end; {
		p.peerSends(side, 200<<10)
		p.peerReads(1-side, 1<<20)
		p.settle()
	}
}

// wantBulk wants side's direction to have large buffers or small ones.
func (p *play) wantBulk(t *testing.T, what string, side int, wide bool) {
	t.Helper()
	from, to := p.socks[side], p.socks[1-side]
	if (from.buffer == bulkBuffer) != wide || (to.unsent == bulkBuffer) != wide {
		t.Errorf("%s: side %d has a buffer of %d, its destination takes %d; want large ones: %v", what, side, from.buffer, to.unsent, wide)
	}
}

// TestBulkIsBounded: directions beyond Config.MaxBulk keep small buffers. One that has
// been quiet, with nothing of it in the kernel, gives its place back and gets small
// buffers; one whose destination does not read keeps both.
func TestBulkIsBounded(t *testing.T) {
	p := quiet(Config{Splice: true, GoneAfter: time.Minute, IdleTimeout: 24 * time.Hour, MaxBulk: 1})
	relay := p.worker.relay
	places := func(what string, want int) {
		t.Helper()
		if got, _ := relay.Bulk(); got != want {
			t.Errorf("%s: %d places are in use, want %d", what, got, want)
		}
	}
	p.elapse(100 * second)
	p.deliver(client, 6<<20)
	p.wantBulk(t, "the first", client, true)
	p.deliver(endpoint, 6<<20)
	p.wantBulk(t, "one too many", endpoint, false)
	if _, refused := relay.Bulk(); refused != 1 {
		t.Errorf("it was refused %d times, want once for each 4 MiB", refused)
	}
	places("one too many", 1)

	p.socks[endpoint].pending, p.socks[endpoint].acked = true, p.now
	for range 10 {
		p.elapse(30 * second)
		p.socks[endpoint].acked = p.now
	}
	p.wantBulk(t, "its reader has stopped", client, true)
	p.socks[endpoint].pending = false
	p.elapse(100 * second)
	p.wantBulk(t, "quiet", client, false)
	places("quiet", 0)

	// A direction that delivers 4 MiB between two looks gets the place, one that
	// takes longer for that does not.
	for range 10 {
		p.deliver(client, 1<<20)
		p.elapse(30 * second)
	}
	p.wantBulk(t, "slow", client, false)
	p.deliver(endpoint, 6<<20)
	p.wantBulk(t, "a place is free", endpoint, true)
	for range 10 {
		p.deliver(endpoint, 5<<20)
		p.elapse(30 * second)
	}
	p.wantBulk(t, "busy", endpoint, true)
	places("busy", 1)
	p.worker.Abort(p.link, Shutdown)
	places("after the end", 0)
	p.wantEnds(t, Shutdown)
}

// TestFarBulkCountsTwice: the kernel's own tuning takes more.
func TestFarBulkCountsTwice(t *testing.T) {
	for most, want := range map[int]int{1: 0, 2: 2} {
		p := quiet(Config{Splice: true, MaxBulk: most})
		p.socks[client].rtt = 20 * time.Millisecond
		p.deliver(client, 3<<20)
		if got, _ := p.worker.relay.Bulk(); got != want || (p.socks[client].buffer == -1) != (want > 0) {
			t.Errorf("with %d places: %d are in use, the buffer is %d", most, got, p.socks[client].buffer)
		}
		p.worker.Abort(p.link, Shutdown)
		if got, _ := p.worker.relay.Bulk(); got != 0 {
			t.Errorf("%d places are in use after the end", got)
		}
	}
}
