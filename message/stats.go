package message

import "sync"

// Stats counts the work of a worker.
type Stats struct {
	Links    uint64 // started
	Open     uint64 // currently open
	Messages uint64 // forwarded in both directions
	Bytes    uint64 // of them
	Receives uint64 // recvmsg calls
	Sends    uint64 // sendmsg calls
	Blocked  uint64 // messages that had to wait for room
}

// publicStats is a copy of a worker's Stats for other goroutines.
type publicStats struct {
	sync.Mutex
	stats Stats
}

func (w *Worker) publish() {
	w.public.Lock()
	defer w.public.Unlock()
	w.public.stats = w.stats
}

// Stats returns the counters as of a few rounds ago at most. It is safe for concurrent
// use.
func (w *Worker) Stats() Stats {
	w.public.Lock()
	defer w.public.Unlock()
	return w.public.stats
}
