package poll

// slot is one registered descriptor, or is free.
type slot struct {
	handler Handler // nil while free
	fd      int32
	gen     uint32 // how often the slot was freed
	next    uint32 // while free: the next free slot (index + 1)
	tag     uint8
}

// slots is the table of registrations. A Registration has the index of its slot. It
// is valid while the slot's generation is the same.
type slots struct {
	list     []slot
	firstGap uint32 // index + 1; 0: none is free
	used     int
}

func (t *slots) take(fd int, tag uint8, h Handler) Registration {
	if t.firstGap == 0 {
		t.list = append(t.list, slot{})
		t.firstGap = uint32(len(t.list))
	}
	r := Registration{slot: t.firstGap}
	s := &t.list[r.slot-1]
	r.gen = s.gen
	t.firstGap = s.next
	s.handler, s.fd, s.tag, s.next = h, int32(fd), tag, 0
	t.used++
	return r
}

// find returns nil for an invalid registration. The slot may move with the next
// take.
func (t *slots) find(r Registration) *slot {
	i := int(r.slot) - 1
	if i < 0 || i >= len(t.list) {
		return nil
	}
	s := &t.list[i]
	if s.gen != r.gen || s.handler == nil {
		return nil
	}
	return s
}

// free releases a slot that find returned.
func (t *slots) free(r Registration) {
	s := &t.list[r.slot-1]
	s.handler = nil
	s.gen++
	s.next = t.firstGap
	t.firstGap = r.slot
	t.used--
}
