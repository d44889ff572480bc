package service

import "slices"

// idPool allocates the lowest free number.
type idPool struct {
	free []PortID // sorted
	next PortID
}

func (p *idPool) get() PortID {
	if len(p.free) > 0 {
		id := p.free[0]
		p.free = p.free[1:]
		return id
	}
	p.next++
	return p.next - 1
}

func (p *idPool) put(id PortID) {
	at, _ := slices.BinarySearch(p.free, id)
	p.free = slices.Insert(p.free, at, id)
}
