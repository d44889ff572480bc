package relay

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

// publish copies the counters for other goroutines: before the worker waits for events,
// and after some rounds without waiting.
func (w *Worker) publish() {
	w.public.Lock()
	defer w.public.Unlock()
	w.public.stats = w.stats
}

// Stats returns the counters as of a few rounds ago at most. It is safe for
// concurrent use.
func (w *Worker) Stats() Stats {
	w.public.Lock()
	defer w.public.Unlock()
	return w.public.stats
}
