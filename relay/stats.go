package relay

import "sync/atomic"

// Stats counts the work of a worker. It includes all system calls for links, but
// not those for accepting connections and waiting for events.
type Stats struct {
	Links    uint64 // started
	Open     uint64 // currently open
	Bytes    uint64 // moved in both directions
	Spliced  uint64 // part of Bytes that was not copied
	Reads    uint64 // recv calls
	Writes   uint64 // send calls
	Splices  uint64
	Shuts    uint64 // shutdown calls
	Closes   uint64 // close calls
	Controls uint64 // epoll_ctl calls
	Others   uint64 // calls for socket options and pipes
	Wasted   uint64 // part of Reads, Writes and Splices that returned EAGAIN
	Promoted uint64 // directions that began to move through pipes
	NoPipe   uint64 // turns that copied for lack of a pipe
	Held     uint64 // bytes in chunks that wait for a slow destination, without those in pipes
}

// SystemCalls returns the total number of system calls.
func (s *Stats) SystemCalls() uint64 {
	return s.Reads + s.Writes + s.Splices + s.Shuts + s.Closes + s.Controls + s.Others
}

// publicStats is a copy of a worker's Stats for other goroutines. The worker
// updates it before it waits for events, and after some rounds without waiting.
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

// Stats returns the counters as of a few rounds ago at most. It is safe for
// concurrent use.
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
