package manifests

import (
	"encoding/binary"
	"hash/fnv"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
)

// allocator gives cluster IPs to Services without one, as the API server does. An address
// follows from the Service's name, so that it is the same at each start; only if another
// Service has that address, the next free one is given. A Service keeps its addresses until
// it goes. The zero value gives none.
type allocator struct {
	ranges []netip.Prefix
	given  map[service.Name][]netip.Addr
	taken  map[netip.Addr]int // by Services, given ones and those of manifests
}

func newAllocator(ranges []netip.Prefix) allocator {
	return allocator{ranges: ranges, given: make(map[service.Name][]netip.Addr), taken: make(map[netip.Addr]int)}
}

// needsAddress reports whether a Service is to get a cluster IP.
func needsAddress(s *corev1.Service) bool {
	return s != nil && s.Spec.Type != corev1.ServiceTypeExternalName && s.Spec.ClusterIP == "" && len(s.Spec.ClusterIPs) == 0
}

// note counts the addresses that a Service of the manifests has by itself.
func (a *allocator) note(s *corev1.Service, by int) {
	if s == nil || len(a.ranges) == 0 {
		return
	}
	for _, text := range s.Spec.ClusterIPs {
		if addr, ok := service.ParseAddr(text); ok {
			if a.taken[addr] += by; a.taken[addr] == 0 {
				delete(a.taken, addr)
			}
		}
	}
}

// assign returns the Service with cluster IPs, if it needs some and there are any.
func (a *allocator) assign(name service.Name, s *corev1.Service) *corev1.Service {
	if len(a.ranges) == 0 || !needsAddress(s) {
		a.release(name)
		return s
	}
	wanted := a.families(s)
	had := a.given[name]
	if !slices.EqualFunc(had, wanted, func(addr netip.Addr, r netip.Prefix) bool { return r.Contains(addr) }) {
		a.release(name)
		had = nil
		for _, r := range wanted {
			addr, ok := a.free(name, r)
			if !ok {
				break
			}
			a.taken[addr]++
			had = append(had, addr)
		}
		if len(had) > 0 {
			a.given[name] = had
		}
	}
	if len(had) == 0 {
		return s
	}
	out := s.DeepCopy()
	for _, addr := range had {
		out.Spec.ClusterIPs = append(out.Spec.ClusterIPs, addr.String())
	}
	out.Spec.ClusterIP = out.Spec.ClusterIPs[0]
	return out
}

// release takes back what a Service was given.
func (a *allocator) release(name service.Name) {
	for _, addr := range a.given[name] {
		if a.taken[addr]--; a.taken[addr] == 0 {
			delete(a.taken, addr)
		}
	}
	delete(a.given, name)
}

// families returns the ranges that a Service gets addresses of: those of its ipFamilies, or
// with a dual-stack policy of both families, else the first.
func (a *allocator) families(s *corev1.Service) (ranges []netip.Prefix) {
	add := func(six bool) {
		for _, r := range a.ranges {
			if r.Addr().Is6() == six && !slices.Contains(ranges, r) {
				ranges = append(ranges, r)
				return
			}
		}
	}
	for _, f := range s.Spec.IPFamilies {
		add(f == corev1.IPv6Protocol)
	}
	if len(ranges) == 0 {
		ranges = append(ranges, a.ranges[0])
	}
	if p := s.Spec.IPFamilyPolicy; p != nil && *p != corev1.IPFamilyPolicySingleStack {
		add(!ranges[0].Addr().Is6())
	}
	return ranges
}

// mostTried bounds the search for a free address.
const mostTried = 1 << 16

// free returns the address of a range that a name hashes to, or the next free one. The first
// and the last address of a range are not given.
func (a *allocator) free(name service.Name, r netip.Prefix) (netip.Addr, bool) {
	size := uint64(1)<<min(r.Addr().BitLen()-r.Bits(), 62) - 2
	if int64(size) < 1 {
		return netip.Addr{}, false
	}
	h := fnv.New64a()
	_, _ = h.Write([]byte(name.String())) // no error, as its documentation says
	at := h.Sum64() % size
	for range min(size, mostTried) {
		addr := plus(r.Addr(), at+1)
		if a.taken[addr] == 0 {
			return addr, true
		}
		at = (at + 1) % size
	}
	return netip.Addr{}, false
}

// plus returns the address that is n after a. The lower 64 bits must not overflow.
func plus(a netip.Addr, n uint64) netip.Addr {
	if a.Is4() {
		b := a.As4()
		binary.BigEndian.PutUint32(b[:], binary.BigEndian.Uint32(b[:])+uint32(n))
		return netip.AddrFrom4(b)
	}
	b := a.As16()
	binary.BigEndian.PutUint64(b[8:], binary.BigEndian.Uint64(b[8:])+n)
	return netip.AddrFrom16(b)
}
