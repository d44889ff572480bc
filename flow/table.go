package flow

import (
	"errors"
	"fmt"
	"hash/maphash"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// list is a list of endpoints in the kernel's map places. Its number is never used again: a
// program that still has an old number finds that list's endpoints or none.
type list struct {
	number, count uint32
	sum           uint64             // of its places, which are in the kernel alone
	members       []bpf.KernelMember // the keys by which its endpoints are found, for session affinity; else nil
}

// tableBuffers are one goroutine's, and reused for one list after another, because a start makes many.
type tableBuffers struct {
	turns  []netip.AddrPort
	places []bpf.KernelPlace
	keys   []bpf.KernelSlot
}

// decidable returns how BPF is to decide about a service port by itself, and false if
// userspace has to be asked.
func (s *portService) decidable() (options bpf.KernelDeciding, ok bool) {
	algorithm, ok := s.balancer.Independent()
	switch {
	case !ok:
		return 0, false
	case algorithm == balancer.RoundRobin:
		return 0, true
	case algorithm == balancer.Random:
		return bpf.KernelDecidingDECIDE_RANDOM, true
	case s.balancer.AffinityWindow() > 0:
		return bpf.KernelDecidingASK_NEW, true // it chooses for new clients
	}
	return 0, false
}

// decide makes the kernel decide about a destination by itself. It uses the lists of candidates in
// lists, and adds missing ones.
func (p *Path) decide(s *portService, st *state, u *policy.Uniform, how bpf.KernelDeciding, served *bpf.KernelServed, lists *[]list, b *tableBuffers) error {
	first, turn, err := p.listOf(s, st, u.Candidates, lists, b)
	if err != nil {
		return err
	}
	pods, podsTurn := first, turn
	if !sameSlice(u.Candidates, u.ForPods) {
		if pods, podsTurn, err = p.listOf(s, st, u.ForPods, lists, b); err != nil {
			return err
		}
	}
	served.List, served.Count = first.number, first.count
	served.PodsList, served.PodsCount = pods.number, pods.count
	if served.Options, served.Turn = how, turn; served.Count == 0 {
		served.Turn = podsTurn
	}
	if u.HidesPods {
		served.Options |= bpf.KernelDecidingHIDE_PODS
	}
	if u.HidesOthers {
		served.Options |= bpf.KernelDecidingHIDE_OTHERS
	}
	if u.OfNode && served.Sources == (bpf.KernelSet{}) {
		served.Options |= bpf.KernelDecidingDECIDE_NODE
	}
	if window := s.balancer.AffinityWindow(); window > 0 {
		served.Group, served.Window = p.server.groupOf(s.name), uint64(window)
	}
	return nil
}

// sameSlice reports whether two lists of candidates share their memory: with policy Local they do
// not.
func sameSlice(a, b []service.Endpoint) bool {
	return len(a) == len(b) && (len(a) == 0 || &a[0] == &b[0])
}

// listOf returns the list of some candidates, and which of them serves the first connection. It adds
// a missing list to lists. Without candidates, it returns no list.
func (p *Path) listOf(s *portService, st *state, candidates []service.Endpoint, lists *[]list, b *tableBuffers) (l list, turn uint32, err error) {
	if len(candidates) == 0 {
		return l, 0, nil
	}
	b.turns, turn = s.balancer.Turns(b.turns[:0], candidates)
	b.places = b.places[:0]
	for _, addr := range b.turns {
		place := bpf.KernelPlace{Addr: bpf.AddressOf(addr.Addr()), Port: bpf.Wire(addr.Port())}
		if st.host.Has(addr.Addr()) {
			place.Own = 1
		}
		b.places = append(b.places, place)
	}
	found, sum := s.balancer.AffinityWindow() > 0, p.server.sumOf(b.places)
	same := func(l list) bool {
		return (l.members != nil) == found && l.sum == sum && l.count == uint32(len(b.places))
	}
	if at := slices.IndexFunc(*lists, same); at >= 0 {
		return (*lists)[at], turn, nil
	}
	if old := slices.IndexFunc(s.lists, same); old >= 0 {
		l = s.lists[old]
	} else if l, err = p.server.newList(b, found); err != nil {
		return l, 0, err
	}
	l.sum = sum
	*lists = append(*lists, l)
	return l, turn, nil
}

// sumOf is a hash of places. Outsiders cannot predict it.
func (s *Server) sumOf(places []bpf.KernelPlace) (sum uint64) {
	type step struct {
		before uint64
		place  bpf.KernelPlace
	}
	for _, place := range places {
		sum = maphash.Comparable(s.seed, step{sum, place})
	}
	return sum
}

// newList puts the list of b's places into the kernel's map. With found, it also enters each endpoint
// as a member, so that BPF finds it by its address.
func (s *Server) newList(b *tableBuffers, found bool) (list, error) {
	l := list{number: atomic.AddUint32(&s.kernel.Control.LastList, 1), count: uint32(len(b.places))}
	if found {
		for _, e := range b.places {
			l.members = append(l.members, bpf.KernelMember{List: l.number, Port: e.Port, Addr: e.Addr})
		}
	}
	_, err := s.kernel.Maps.Places.BatchUpdate(b.keysOf(l), b.places, nil)
	for number := range l.members {
		if n := uint32(number); err == nil {
			err = s.kernel.Maps.Members.Put(&l.members[number], &n)
		}
	}
	if err != nil {
		s.removeList(l, b)
		return list{}, fmt.Errorf("the kernel's table of endpoints: %w", err)
	}
	return l, nil
}

func (s *Server) removeList(l list, b *tableBuffers) {
	keys := b.keysOf(l)
	if _, err := s.kernel.Maps.Places.BatchDelete(keys, nil); err != nil {
		for i := range keys { // some were missing
			_ = s.kernel.Maps.Places.Delete(&keys[i])
		}
	}
	for i := range l.members {
		_ = s.kernel.Maps.Members.Delete(&l.members[i])
	}
}

// keysOf returns a list's keys, until it is called again.
func (b *tableBuffers) keysOf(l list) []bpf.KernelSlot {
	keys := b.keys[:0]
	for i := range l.count {
		keys = append(keys, bpf.KernelSlot{List: l.number, Number: i})
	}
	b.keys = keys
	return keys
}

// steered is a destination of a service port, and what the kernel's map has of it. Most service
// ports have one or two: a list of them takes less memory than a map.
type steered struct {
	at     bpf.KernelDestination
	served bpf.KernelServed
}

// steering is the entries of a service port that the kernel's maps should have.
type steering struct {
	destinations []steered
	lists        []list
	sets         []bpf.KernelSet // of source ranges
}

// wanted returns the destinations of a service port that the kernel is to decide, or ask,
// about. Their lists and source ranges are in the kernel.
func (p *Path) wanted(s *portService, st *state, b *tableBuffers) (w steering) {
	if !s.inKernel || s.balancer == nil || int(s.port.ID)+1 >= bpf.Services {
		return w
	}
	if left := s.balancer.StartsUntil() - poll.Nanotime(); left > 0 {
		p.server.askUntil(s.load, uint64(sys.Monotonic()+left)) // the table has no shares
	}
	how, decides := s.decidable()
	forNode := isForNode(s.port, st)
	s.forNode.Store(forNode)
	decides = decides && p.protocol != service.SCTP && !s.isLimited() && !p.server.options.ask
	for d := range st.table.Destinations(s.port) {
		if st.table.Steering(d) != policy.Accept || d.Addr.IsLoopback() || !st.forwards[service.FamilyOf(d.Addr)] || st.host.Has(d.Addr) && !p.bound[d] {
			continue
		}
		served := bpf.KernelServed{Service: s.load}
		admits := true
		if list, limited := st.table.SourceRanges(d); limited {
			var err error
			if served.Sources, err = p.server.ranges.add(list); err != nil {
				p.server.warn(err) // userspace decides
				admits = false
			} else {
				w.sets = append(w.sets, served.Sources)
			}
		}
		if u, ok := st.table.Uniform(d); ok && decides && admits {
			if err := p.decide(s, st, &u, how, &served, &w.lists, b); err != nil {
				p.server.warn(err) // userspace decides
			}
		}
		if forNode {
			served.Options |= bpf.KernelDecidingASK_NODE
		}
		w.destinations = append(w.destinations, steered{bpf.DestinationOf(d), served})
	}
	return w
}

// warn logs a problem once. Any goroutine of wantedOf may call it.
func (s *Server) warn(problem error) {
	s.warning.Lock()
	defer s.warning.Unlock()
	s.once.Warn("kernel flows", problem)
}

// wantedOf returns wanted for each of several service ports. At a start, a million endpoints go into
// the kernel's map: as many processors as there are, up to four, enter them.
func (p *Path) wantedOf(all []*portService, st *state) []steering {
	const share, most = 64, 4
	w := make([]steering, len(all))
	var taken atomic.Int64
	work := func(b *tableBuffers) {
		for {
			end := int(taken.Add(share))
			if end-share >= len(all) {
				return
			}
			for i := end - share; i < min(end, len(all)); i++ {
				w[i] = p.wanted(all[i], st, b)
			}
		}
	}
	var others sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), most, (len(all)+share-1)/share) - 1 {
		others.Go(func() { work(new(tableBuffers)) })
	}
	work(&p.server.buffers)
	others.Wait()
	return w
}

// withdraw removes a service port's destinations from the kernel's map, except those that it keeps
// or that another service port has now.
func (p *Path) withdraw(s *portService, stay map[bpf.KernelDestination]bool) {
	m := p.server.kernel.Maps.Destinations
	for i := range s.destinations {
		d := &s.destinations[i]
		if stay[d.at] {
			continue
		}
		var now bpf.KernelServed
		// It may be another service port's already.
		if m.Lookup(&d.at, &now) == nil && now.Service == d.served.Service {
			_ = m.Delete(&d.at)
		}
	}
}

// steer makes the kernel decide, or ask, about the destinations of service ports. Call withdraw first.
func (p *Path) steer(all []*portService, wanted []steering) {
	m := p.server.kernel.Maps.Destinations
	var keys []bpf.KernelDestination
	var values []bpf.KernelServed
	for i, s := range all {
		for j := range wanted[i].destinations {
			d := &wanted[i].destinations[j]
			found := slices.IndexFunc(s.destinations, func(old steered) bool { return old.at == d.at })
			if found >= 0 && sameDecision(s.destinations[found].served, d.served) {
				continue
			}
			var had bpf.KernelServed
			if p.server.inherits && found < 0 && d.served.Count+d.served.PodsCount > 0 && m.Lookup(&d.at, &had) == nil && had.Count == d.served.Count {
				d.served.Turn = had.Turn // of the process before
			}
			keys, values = append(keys, d.at), append(values, d.served)
		}
	}
	failed := make(map[bpf.KernelDestination]bool)
	var err error
	if len(keys) > 0 {
		_, err = m.BatchUpdate(keys, values, nil)
	}
	for i := 0; err != nil && i < len(keys); i++ { // which of them are in is not certain
		if err := m.Put(&keys[i], &values[i]); err != nil {
			p.server.warn(err) // the relay serves it
			_ = m.Delete(&keys[i])
			failed[keys[i]] = true
		}
	}
	for i, s := range all {
		s.destinations = slices.DeleteFunc(wanted[i].destinations, func(d steered) bool { return failed[d.at] })
		p.forget(s, wanted[i])
	}
}

// sameDecision reports whether the kernel decides alike by both. The turn goes on by itself.
func sameDecision(a, b bpf.KernelServed) bool {
	a.Turn, b.Turn = 0, 0
	return a == b
}

// forget removes those of a service port's lists and source ranges that are not wanted, after steer.
func (p *Path) forget(s *portService, wanted steering) {
	for _, l := range s.lists {
		if !slices.ContainsFunc(wanted.lists, func(n list) bool { return n.number == l.number }) {
			p.server.removeList(l, &p.server.buffers)
		}
	}
	for _, set := range s.sets {
		p.server.ranges.release(set)
	}
	s.lists, s.sets = wanted.lists, wanted.sets
}

// purge removes the destinations of an earlier process that are no longer wanted, and lists of
// endpoints that nothing uses. The first Apply calls it.
func (p *Path) purge() {
	if !p.server.inherits {
		return
	}
	wanted := make(map[bpf.KernelDestination]bool)
	for _, s := range p.services {
		for _, d := range s.destinations {
			wanted[d.at] = true
		}
	}
	var d bpf.KernelDestination
	var served bpf.KernelServed
	var gone []bpf.KernelDestination
	used, sets := make(map[uint32]bool), make(map[bpf.KernelSet]bool)
	for all := p.server.kernel.Maps.Destinations.Iterate(); all.Next(&d, &served); {
		if bpf.ProtocolOf(d.Protocol) == p.protocol && !wanted[d] {
			gone = append(gone, d)
		} else {
			used[served.List], used[served.PodsList], sets[served.Sources] = true, true, true
		}
	}
	for i := range gone {
		_ = p.server.kernel.Maps.Destinations.Delete(&gone[i])
	}
	p.server.ranges.purge(sets)
	if p.server.lastList == 0 { // a million endpoints take seconds
		return
	}
	var slot bpf.KernelSlot
	var place bpf.KernelPlace
	var unused []bpf.KernelSlot
	for all := p.server.kernel.Maps.Places.Iterate(); all.Next(&slot, &place); {
		if !used[slot.List] {
			unused = append(unused, slot)
		}
	}
	for i := range unused {
		_ = p.server.kernel.Maps.Places.Delete(&unused[i])
	}
	var member bpf.KernelMember
	var number uint32
	var left []bpf.KernelMember
	for all := p.server.kernel.Maps.Members.Iterate(); all.Next(&member, &number); {
		if !used[member.List] {
			left = append(left, member)
		}
	}
	for i := range left {
		_ = p.server.kernel.Maps.Members.Delete(&left[i])
	}
}

// originsOf returns what BPF has to know about clients: whether they are pods, and which
// link they are on, and the node's own addresses. An address has the values of the longest range that
// contains it.
func originsOf(pods []netip.Prefix, links []hostnet.Link, host hostnet.Addresses) map[bpf.KernelOriginKey]bpf.KernelOrigin {
	all := make(map[bpf.KernelOriginKey]bpf.KernelOrigin)
	covers := func(a, b netip.Prefix) bool { return a.Bits() <= b.Bits() && a.Contains(b.Addr()) }
	add := func(p netip.Prefix) {
		var o bpf.KernelOrigin
		if p.IsSingleIP() && host.Has(p.Addr()) {
			o.Own = 1
		}
		if slices.ContainsFunc(pods, func(r netip.Prefix) bool { return covers(r, p) }) {
			o.Pod = 1
		}
		longest := -1
		for _, l := range links {
			if covers(l.Range, p) && l.Range.Bits() > longest {
				longest, o.Link = l.Range.Bits(), uint32(l.Number)
			}
		}
		all[bpf.OriginOf(p)] = o
	}
	for _, p := range pods {
		add(p)
	}
	for _, l := range links {
		add(l.Range)
	}
	for a := range host {
		add(netip.PrefixFrom(a, a.BitLen()))
	}
	return all
}

// setOrigins brings the kernel's map of origins up to date.
func (s *Server) setOrigins(table *policy.Table, host hostnet.Addresses) {
	wanted := originsOf(table.Pods(), s.options.Links(), host)
	if s.origins != nil && maps.Equal(s.origins, wanted) {
		return
	}
	m := s.kernel.Maps.Origins
	for k, o := range wanted {
		if err := m.Put(&k, &o); err != nil {
			s.warn(fmt.Errorf("the kernel's table of clients: %w", err))
		}
	}
	var key bpf.KernelOriginKey
	var gone []bpf.KernelOriginKey
	var o bpf.KernelOrigin
	for all := m.Iterate(); all.Next(&key, &o); {
		if _, is := wanted[key]; !is {
			gone = append(gone, key)
		}
	}
	for i := range gone {
		if err := m.Delete(&gone[i]); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			s.warn(fmt.Errorf("the kernel's table of clients: %w", err))
		}
	}
	s.origins = wanted
}
