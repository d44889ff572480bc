package bpf

import "sync/atomic"

// Spares are the indices of free flows, in a ring that BPF takes from too. Only the worker
// puts indices in. The ring stays whole if the process is killed at any moment.
type Spares struct {
	ring    []KernelSpare // a power of two, no shorter than all flows
	control *KernelControl
}

// ringFor returns the length of the ring for so many flows.
func ringFor(flows int) int {
	n := 1
	for n < flows {
		n *= 2
	}
	return n
}

// Len returns how many indices are in the ring.
func (s *Spares) Len() int {
	taken := atomic.LoadUint64(&s.control.Taken)
	return int(atomic.LoadUint64(&s.control.Given) - taken)
}

// Give puts an index in.
func (s *Spares) Give(index uint32) {
	given := s.control.Given
	atomic.StoreUint64(&s.ring[given&uint64(len(s.ring)-1)].Flow, uint64(index))
	atomic.StoreUint64(&s.control.Given, given+1)
}

// Take takes an index out.
func (s *Spares) Take() (index uint32, ok bool) {
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

// Mark sets the elements whose indices are in the ring.
func (s *Spares) Mark(set []bool) {
	for at := atomic.LoadUint64(&s.control.Taken); at < atomic.LoadUint64(&s.control.Given); at++ {
		if index := s.ring[at&uint64(len(s.ring)-1)].Flow; index < uint64(len(set)) {
			set[index] = true
		}
	}
}

// Fill puts all indices of so many flows into a ring that was never used. Programs take none
// before.
func (s *Spares) Fill(flows int) {
	for i := flows; i > 0; i-- {
		s.Give(uint32(i))
	}
	atomic.StoreUint32(&s.control.SpareMask, uint32(len(s.ring)-1))
}
