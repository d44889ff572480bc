package service

import "container/heap"

// idPool allocates the lowest free number.
type idPool struct {
	free idHeap
	next PortID
}

func (p *idPool) get() PortID {
	if len(p.free) > 0 {
		return heap.Pop(&p.free).(PortID)
	}
	p.next++
	return p.next - 1
}

func (p *idPool) put(id PortID) { heap.Push(&p.free, id) }

type idHeap []PortID

func (h idHeap) Len() int           { return len(h) }
func (h idHeap) Less(i, j int) bool { return h[i] < h[j] }
func (h idHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *idHeap) Push(x any)        { *h = append(*h, x.(PortID)) }
func (h *idHeap) Pop() any {
	last := len(*h) - 1
	x := (*h)[last]
	*h = (*h)[:last]
	return x
}
