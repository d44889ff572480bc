package relay

import "sync/atomic"

// Stats counts what a worker did since it began. The system calls are all that
// it makes for its links; those for accepting, connecting and waiting for
// events are others'.
type Stats struct {
	Links    uint64 // started
	Open     uint64 // started and not ended
	Bytes    uint64 // moved, both ways
	Spliced  uint64 // of Bytes: those that were not copied
	Reads    uint64 // recv calls
	Writes   uint64 // send calls
	Splices  uint64
	Shuts    uint64 // shutdown calls
	Closes   uint64 // close calls
	Controls uint64 // epoll_ctl calls
	Others   uint64 // socket options, and what pipes need
	Wasted   uint64 // of Reads, Writes and Splices: those that moved nothing, with EAGAIN
	Promoted uint64 // directions that began to move through pipes
	NoPipe   uint64 // turns that copied because no pipe was to be had
	Held     uint64 // bytes in buffers, waiting for a slow destination (those in pipes are not counted)
}

// SystemCalls returns the sum of the calls.
func (s *Stats) SystemCalls() uint64 {
	return s.Reads + s.Writes + s.Splices + s.Shuts + s.Closes + s.Controls + s.Others
}

// publicStats is the copy of a worker's Stats that others may read. The worker
// brings it up to date before it waits for events, and every so often while it
// has no time to wait.
type publicStats struct {
	links, open, bytes, spliced                             atomic.Uint64
	reads, writes, splices, shuts, closes, controls, others atomic.Uint64
	wasted, promoted, noPipe, held                          atomic.Uint64
}

func (w *Worker) publish() {
	s, p := &w.stats, &w.public
	p.links.Store(s.Links)
	p.open.Store(s.Open)
	p.bytes.Store(s.Bytes)
	p.spliced.Store(s.Spliced)
	p.reads.Store(s.Reads)
	p.writes.Store(s.Writes)
	p.splices.Store(s.Splices)
	p.shuts.Store(s.Shuts)
	p.closes.Store(s.Closes)
	p.controls.Store(s.Controls)
	p.others.Store(s.Others)
	p.wasted.Store(s.Wasted)
	p.promoted.Store(s.Promoted)
	p.noPipe.Store(s.NoPipe)
	p.held.Store(s.Held)
}

// Stats returns the counters as of the last time that the worker had nothing to
// do, or a few rounds ago. It may be called from any goroutine.
func (w *Worker) Stats() Stats {
	p := &w.public
	return Stats{
		Links:    p.links.Load(),
		Open:     p.open.Load(),
		Bytes:    p.bytes.Load(),
		Spliced:  p.spliced.Load(),
		Reads:    p.reads.Load(),
		Writes:   p.writes.Load(),
		Splices:  p.splices.Load(),
		Shuts:    p.shuts.Load(),
		Closes:   p.closes.Load(),
		Controls: p.controls.Load(),
		Others:   p.others.Load(),
		Wasted:   p.wasted.Load(),
		Promoted: p.promoted.Load(),
		NoPipe:   p.noPipe.Load(),
		Held:     p.held.Load(),
	}
}
