package flow

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// list is a list of endpoints in the kernel's map places. Its number is used once: a program
// that still knows an old list finds its endpoints or none.
type list struct {
	number uint32
	places []bpf.KernelPlace
	found  bool // by its endpoints too, for session affinity
}

// decidable returns how BPF is to decide about a service port by itself, and false if
// userspace has to be asked.
func (s *portService) decidable() (options bpf.KernelDeciding, ok bool) {
	algorithm, ok := s.balancer.Independent()
	switch {
	case !ok:
		return 0, false
	case algorithm == balancer.RoundRobin, s.balancer.AffinityWindow() > 0: // remembered clients
		return 0, true
	case algorithm == balancer.Random:
		return bpf.KernelDecidingDECIDE_RANDOM, true
	}
	return 0, false
}

// decide has the kernel decide about a destination by itself. It finds or makes the lists of candidates
// among lists.
func (p *Path) decide(s *portService, st *state, u *policy.Uniform, how bpf.KernelDeciding, served *bpf.KernelServed, lists *[]list) error {
	first, turn, err := p.listOf(s, st, u.Candidates, lists)
	if err != nil {
		return err
	}
	pods, podsTurn, err := p.listOf(s, st, u.ForPods, lists)
	if err != nil {
		return err
	}
	served.List, served.Count = first.number, uint32(len(first.places))
	served.PodsList, served.PodsCount = pods.number, uint32(len(pods.places))
	if served.Options, served.Turn = how, turn; served.Count == 0 {
		served.Turn = podsTurn
	}
	if u.HidesPods {
		served.Options |= bpf.KernelDecidingHIDE_PODS
	}
	if u.HidesOthers {
		served.Options |= bpf.KernelDecidingHIDE_OTHERS
	}
	if window := s.balancer.AffinityWindow(); window > 0 {
		served.Group, served.Window = p.server.groupOf(s.name), uint64(window)
	}
	return nil
}

// listOf finds or makes the list of some candidates among lists. It returns the turn of the first
// connection, too. There is no list of none.
func (p *Path) listOf(s *portService, st *state, candidates []service.Endpoint, lists *[]list) (l list, turn uint32, err error) {
	if len(candidates) == 0 {
		return l, 0, nil
	}
	candidates, turn = s.balancer.Turns(candidates)
	places := make([]bpf.KernelPlace, len(candidates))
	for i := range candidates {
		addr := candidates[i].Addr
		places[i] = bpf.KernelPlace{Addr: bpf.AddressOf(addr.Addr()), Port: bpf.Wire(addr.Port())}
		if st.host.Has(addr.Addr()) {
			places[i].Own = 1
		}
	}
	window := s.balancer.AffinityWindow()
	same := func(l list) bool { return l.found == (window > 0) && slices.Equal(l.places, places) }
	if at := slices.IndexFunc(*lists, same); at >= 0 {
		return (*lists)[at], turn, nil
	}
	if old := slices.IndexFunc(s.lists, same); old >= 0 {
		l = s.lists[old]
	} else if l, err = p.server.newList(places, window > 0); err != nil {
		return l, 0, err
	}
	*lists = append(*lists, l)
	return l, turn, nil
}

// newList puts a list into the kernel's map.
func (s *Server) newList(places []bpf.KernelPlace, found bool) (list, error) {
	c := s.kernel.Control
	c.LastList++
	l := list{number: c.LastList, places: places, found: found}
	_, err := s.kernel.Maps.Places.BatchUpdate(l.keys(), places, nil)
	for number, key := range l.members() {
		if n := uint32(number); err == nil {
			err = s.kernel.Maps.Members.Put(&key, &n)
		}
	}
	if err != nil {
		s.removeList(l)
		return list{}, fmt.Errorf("the kernel's table of endpoints: %w", err)
	}
	return l, nil
}

func (s *Server) removeList(l list) {
	keys := l.keys()
	if _, err := s.kernel.Maps.Places.BatchDelete(keys, nil); err != nil {
		for i := range keys { // some were missing
			_ = s.kernel.Maps.Places.Delete(&keys[i])
		}
	}
	for _, key := range l.members() {
		_ = s.kernel.Maps.Members.Delete(&key)
	}
}

// members returns the keys by which the list's endpoints are found; none if they need not be.
func (l *list) members() []bpf.KernelMember {
	if !l.found {
		return nil
	}
	keys := make([]bpf.KernelMember, len(l.places))
	for i, e := range l.places {
		keys[i] = bpf.KernelMember{List: l.number, Port: e.Port, Addr: e.Addr}
	}
	return keys
}

func (l *list) keys() []bpf.KernelSlot {
	keys := make([]bpf.KernelSlot, len(l.places))
	for i := range keys {
		keys[i] = bpf.KernelSlot{List: l.number, Number: uint32(i)}
	}
	return keys
}

// steering is what the kernel is to have of a service port.
type steering struct {
	destinations map[bpf.KernelDestination]bpf.KernelServed
	lists        []list
	sets         []bpf.KernelSet // of source ranges
}

// wanted returns the destinations of a service port that the kernel is to decide, or ask,
// about. Their lists and source ranges are in the kernel.
func (p *Path) wanted(s *portService, st *state) (w steering) {
	if !s.inKernel || s.balancer == nil || int(s.port.ID)+1 >= bpf.Services {
		return w
	}
	w.destinations = make(map[bpf.KernelDestination]bpf.KernelServed)
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
				p.server.once.Warn("kernel flows", err) // userspace decides
				admits = false
			} else {
				w.sets = append(w.sets, served.Sources)
			}
		}
		if u, ok := st.table.Uniform(d); ok && decides && admits {
			if err := p.decide(s, st, &u, how, &served, &w.lists); err != nil {
				p.server.once.Warn("kernel flows", err) // userspace decides
			}
		}
		if forNode {
			served.Options |= bpf.KernelDecidingASK_NODE
		}
		w.destinations[bpf.DestinationOf(d)] = served
	}
	return w
}

// withdraw removes a service port's destinations from the kernel's map, but those that stay
// with it or with another one.
func (p *Path) withdraw(s *portService, stay map[bpf.KernelDestination]bool) {
	m := p.server.kernel.Maps.Destinations
	for d, served := range s.destinations {
		if stay[d] {
			continue
		}
		var now bpf.KernelServed
		// It may be another service port's already.
		if m.Lookup(&d, &now) == nil && now.Service == served.Service {
			_ = m.Delete(&d)
		}
	}
}

// steer has the kernel decide, or ask, about a service port's destinations, after withdraw.
func (p *Path) steer(s *portService, wanted steering) {
	m := p.server.kernel.Maps.Destinations
	for d, served := range wanted.destinations {
		had, ok := s.destinations[d]
		if ok && sameDecision(had, served) {
			continue
		}
		if !ok && served.Count+served.PodsCount > 0 && m.Lookup(&d, &had) == nil && had.Count == served.Count {
			served.Turn = had.Turn // of the process before
		}
		if err := m.Put(&d, &served); err != nil {
			p.server.once.Warn("kernel flows", err) // the relay serves it
			_ = m.Delete(&d)
			delete(wanted.destinations, d)
		}
	}
	s.destinations = wanted.destinations
	p.forget(s, wanted)
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
			p.server.removeList(l)
		}
	}
	for _, set := range s.sets {
		p.server.ranges.release(set)
	}
	s.lists, s.sets = wanted.lists, wanted.sets
}

// purge removes the destinations that an earlier process left and nobody wants, and lists
// of endpoints that are in no use. It belongs to the first Apply.
func (p *Path) purge() {
	wanted := make(map[bpf.KernelDestination]bool)
	for _, s := range p.services {
		for d := range s.destinations {
			wanted[d] = true
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
// link they are on. An address has the values of the longest range that contains it.
func originsOf(pods []netip.Prefix, links []hostnet.Link) map[bpf.KernelOriginKey]bpf.KernelOrigin {
	all := make(map[bpf.KernelOriginKey]bpf.KernelOrigin)
	covers := func(a, b netip.Prefix) bool { return a.Bits() <= b.Bits() && a.Contains(b.Addr()) }
	add := func(p netip.Prefix) {
		var o bpf.KernelOrigin
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
	return all
}

// setOrigins brings the kernel's map of origins up to date.
func (s *Server) setOrigins(table *policy.Table) {
	wanted := originsOf(table.Pods(), s.options.Links())
	if s.origins != nil && maps.Equal(s.origins, wanted) {
		return
	}
	m := s.kernel.Maps.Origins
	for k, o := range wanted {
		if err := m.Put(&k, &o); err != nil {
			s.once.Warn("kernel flows", fmt.Errorf("the kernel's table of clients: %w", err))
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
			s.once.Warn("kernel flows", fmt.Errorf("the kernel's table of clients: %w", err))
		}
	}
	s.origins = wanted
}
