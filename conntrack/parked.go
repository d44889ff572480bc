package conntrack

// Keeper is an Owner that knows its open connection without a Record: it builds one when
// somebody asks. It may also implement Refresher and Ender.
type Keeper interface {
	// Describe sets what a parked record said when it was parked, or what it would say
	// now. The Shard knows ID, Wall and what has been counted and looked at.
	Describe(*Record)
}

// Parked is what a Shard needs of an open connection without a Record. Its zero value is
// ready for use. Only the connection's event loop accesses it.
type Parked struct {
	prev, next *Parked // in the shard's ring
	keeper     Keeper  // nil: a position in the ring
	id         uint64
	wall       int64
	announced  int64 // attemptStart
	counted    [2]uint64
	looked     *looked // nil if nobody has looked
}

// Park takes the record of an open TCP connection out of the table, and p in: it stands for
// the connection from then on, until Unpark. It returns false if that does not work now: a
// record with failed attempts stays, and all do while somebody walks over the table.
func (s *Shard) Park(r *Record, p *Parked, k Keeper) bool {
	if s.walks > 0 || r.state != recordOpen || r.Failed != nil {
		return false
	}
	*p = Parked{
		keeper: k, id: r.ID, wall: r.Wall, announced: r.attemptStart, counted: [2]uint64{r.countedFromClient, r.countedFromEndpoint}, looked: r.looked,
	}
	r.unlink()
	p.insertBefore(&s.parked)
	return true
}

// Unpark undoes Park. The record must not move in memory until Close, which is to follow at
// once: a walk over the table might miss the connection, or meet it twice.
func (s *Shard) Unpark(p *Parked, r *Record) {
	p.describe(s, r)
	if r.Counters != nil && r.Endpoint != nil {
		r.load = r.Counters.loads.Of(r.Endpoint.Addr) // which counts it still
	}
	p.unlink()
	*p = Parked{}
	r.insertBefore(&s.list)
}

// describe makes r the record of the connection, outside the list.
func (p *Parked) describe(s *Shard, r *Record) {
	*r = Record{
		ID: p.id, Wall: p.wall, Owner: p.keeper, shard: s, state: recordOpen, attemptStart: p.announced,
		countedFromClient: p.counted[0], countedFromEndpoint: p.counted[1], looked: p.looked,
	}
	p.keeper.Describe(r)
	r.self = s.table.selfAt(r.Client.Addr())
}

// with calls f with the connection's record, which is up to date, and takes over what f
// changes of it.
func (p *Parked) with(s *Shard, f func(*Record)) {
	r := &s.scratch
	p.describe(s, r)
	r.refresh()
	if f != nil {
		f(r)
	}
	p.announced, p.counted, p.looked = r.attemptStart, [2]uint64{r.countedFromClient, r.countedFromEndpoint}, r.looked
	*r = Record{}
}

// insertBefore inserts p into the ring before another one.
func (p *Parked) insertBefore(at *Parked) {
	p.prev, p.next = at.prev, at
	at.prev.next = p
	at.prev = p
}

// unlink removes p from its ring.
func (p *Parked) unlink() {
	p.prev.next, p.next.prev = p.next, p.prev
	p.prev, p.next = nil, nil
}

// resume returns what to continue with in the ring of a shard: a marker's place, from which
// it is taken, or the first one.
func (p *Parked) resume(s *Shard) *Parked {
	if p.next == nil {
		return s.parked.next
	}
	next := p.next
	p.unlink()
	return next
}

// refreshParked is Refresh for parked connections.
func (s *Shard) refreshParked(n int) (more bool) {
	p := s.parkedPosition.resume(s)
	for ; p != &s.parked && n > 0; p = p.next {
		if p.keeper != nil {
			p.with(s, nil)
			n--
		}
	}
	if p == &s.parked {
		return false
	}
	s.parkedPosition.insertBefore(p)
	return true
}

// eachParked goes on with the parked connections of a walk: at most so many, until f returns
// false, and while there is room for their copies. It returns false after the last one.
func (l *lister) eachParked(n, room int, f func(*Parked) bool) (more bool) {
	l.clear()
	p := l.parked.resume(l.shard)
	for ; p != &l.shard.parked && n > 0 && len(l.copies) < room; n-- {
		next := p.next // f may end the connection; then others stay
		if p.keeper != nil && !f(p) {
			return false
		}
		p = next
	}
	if p == &l.shard.parked {
		return false
	}
	l.parked.insertBefore(p)
	return true
}
