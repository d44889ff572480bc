package flow

import "sync/atomic"

// spares are the indices of free flows, in a ring that BPF takes from too. Only the worker
// puts indices in. A process that is killed at any moment leaves it whole.
type spares struct {
	ring    []kernelSpare // a power of two, no shorter than all flows
	control *kernelControl
}

// ringFor returns the length of the ring for so many flows.
func ringFor(flows int) int {
	n := 1
	for n < flows {
		n *= 2
	}
	return n
}

func (s *spares) len() int {
	taken := atomic.LoadUint64(&s.control.Taken)
	return int(atomic.LoadUint64(&s.control.Given) - taken)
}

// give puts an index in.
func (s *spares) give(index uint32) {
	given := s.control.Given
	atomic.StoreUint64(&s.ring[given&uint64(len(s.ring)-1)].Flow, uint64(index))
	atomic.StoreUint64(&s.control.Given, given+1)
}

// take takes an index out.
func (s *spares) take() (index uint32, ok bool) {
	for {
		at := atomic.LoadUint64(&s.control.Taken)
		if at == atomic.LoadUint64(&s.control.Given) {
			return 0, false
		}
		index := uint32(atomic.LoadUint64(&s.ring[at&uint64(len(s.ring)-1)].Flow))
		if atomic.CompareAndSwapUint64(&s.control.Taken, at, at+1) {
			return index, true
		}
	}
}

// has sets what is in the ring.
func (s *spares) has(set []bool) {
	for at := atomic.LoadUint64(&s.control.Taken); at < atomic.LoadUint64(&s.control.Given); at++ {
		if index := s.ring[at&uint64(len(s.ring)-1)].Flow; index < uint64(len(set)) {
			set[index] = true
		}
	}
}
