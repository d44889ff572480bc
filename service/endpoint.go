package service

import (
	"fmt"
	"net/netip"
)

// aims counts endpoints by address and by port. With it, the Store finds out
// whether a Service's address is also an endpoint's without reading all endpoints.
// Addresses are counted by hash; a collision costs time only.
type aims struct {
	addrs map[uint32]int32
	ports map[uint16]int32
}

func newAims() aims {
	return aims{addrs: make(map[uint32]int32), ports: make(map[uint16]int32)}
}

func hashAddr(a netip.Addr) uint32 {
	b := a.As16()
	return uint32(hashKey(wide(b, 0, 0, 0)) >> 32)
}

// count adds the endpoints of a slice with by = 1 and removes them with -1.
func (x *aims) count(s *slice, by int32) {
	for i := range s.endpoints {
		bump(x.addrs, hashAddr(s.endpoints[i].Addr.Addr()), by)
	}
	for _, p := range s.ports {
		bump(x.ports, p.port, by)
	}
}

func bump[K comparable](counts map[K]int32, k K, by int32) {
	if counts[k] += by; counts[k] == 0 {
		delete(counts, k)
	}
}

// review schedules the endpoints at an address or node port for judgeAgain, after
// the owner of the address or port changed.
func (s *Store) review(k key, u *update) {
	switch a := netip.AddrFrom16(k.addr).Unmap(); {
	case k.class == byNodePort:
		if s.aims.ports[k.port] > 0 {
			u.aimedPorts.Insert(k.port)
		}
	case s.aims.addrs[hashAddr(a)] > 0:
		u.aimedAddrs.Insert(a)
	}
}

// judgeAgain schedules the services for a rebuild whose endpoints may be judged
// differently now.
func (s *Store) judgeAgain(u *update) {
	if len(u.aimedAddrs) == 0 && len(u.aimedPorts) == 0 {
		return
	}
	for _, st := range s.services {
		if st.aimedAt(u) {
			u.endpoints.Insert(st)
		}
	}
}

func (st *state) aimedAt(u *update) bool {
	for _, sl := range st.slices {
		for _, p := range sl.ports {
			if u.aimedPorts.Has(p.port) {
				return true
			}
		}
		for i := range sl.endpoints {
			if u.aimedAddrs.Has(sl.endpoints[i].Addr.Addr()) {
				return true
			}
		}
	}
	return false
}

// leadsTo reports whether the slices list an endpoint of a port at a destination,
// even if the Store leaves that endpoint out.
func (st *state) leadsTo(port int, at Destination) bool {
	ps := st.spec.ports[port]
	for _, sl := range st.slices {
		for _, p := range sl.ports {
			if p.name != ps.name || p.protocol != ps.protocol || p.port != at.Port {
				continue
			}
			for i := range sl.endpoints {
				if sl.endpoints[i].Addr.Addr() == at.Addr {
					return true
				}
			}
		}
	}
	return false
}

// apiServer is the Service whose endpoints the API server writes itself. They have
// a node's address and no nodeName.
var apiServer = Name{Namespace: "default", Name: "kubernetes"}

// judge returns why the Store must leave out an endpoint, or "". mayReturn is
// Endpoint.MayReturn: the address may belong to a Service, on this node or another
// one. The Store keeps such an endpoint. Otherwise, any tenant could remove another
// tenant's endpoint by an external IP or a node port.
func (s *Store) judge(st *state, sl *slice, e *Endpoint, at Destination) (why string, mayReturn bool) {
	switch {
	case s.hosts.broadcast.Has(at.Addr):
		return "is the broadcast address of a link", false
	case s.hosts.own.Has(at.Addr) && !e.Local && !sl.asked && st.name != apiServer:
		return "is an address of this node, and its nodeName does not say so", false
	case s.claims.clusterIPs[clusterIPKey(at.Addr)] > 0: // tenants do not choose cluster IPs
		return "is a cluster IP", false
	}
	_, nodePort := s.claims.winner(nodePortKey(eitherFamily, at.Protocol, at.Port))
	return "", nodePort || s.claims.outer[at.Addr] > 0 && len(s.claims.byKey[addrKey(at)]) > 0
}

// mostRefused bounds the endpoints of a service that problems name.
const mostRefused = 4

// refusals collects what is wrong with the endpoints of a service.
type refusals struct {
	texts []string
	more  int
}

func (r *refusals) add(at Destination, why string) {
	if len(r.texts) == mostRefused {
		r.more++ // without a text that nobody reads
		return
	}
	r.note(fmt.Sprintf("endpoint %s/%s %s: left out", netip.AddrPortFrom(at.Addr, at.Port), at.Protocol, why))
}

func (r *refusals) note(text string) {
	if len(r.texts) == mostRefused {
		r.more++
		return
	}
	r.texts = append(r.texts, text)
}

func (r *refusals) problems() []string {
	if r.more > 0 {
		return append(r.texts, fmt.Sprintf("%d more endpoints are left out, or listed twice", r.more))
	}
	return r.texts
}
