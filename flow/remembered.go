package flow

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
)

// remembered keeps the kernel's table equal to the clients that session affinity remembers for one
// service port. As the balancer's Mirror, it adds a client once its endpoint has answered, and
// removes it when the endpoint fails. The table outlives the process.
type remembered struct {
	server *Server
	group  bpf.KernelSet
	zero   int64 // CLOCK_MONOTONIC at time 0 of the loop's clock
}

var _ balancer.Mirror = (*remembered)(nil)

// groupOf names the clients of a service port (A5.1), by which the next process finds them.
func (s *Server) groupOf(name service.PortName) bpf.KernelSet {
	return s.setOf([]byte(name.String()))
}

// setOf returns the name of a set in the kernel's maps. The seed is secret, so that tenants cannot
// make the names of two sets collide.
func (s *Server) setOf(content []byte) bpf.KernelSet {
	sum := sha256.Sum256(binary.NativeEndian.AppendUint64(content, s.kernel.Control.Seed))
	return bpf.KernelSet{Half: [2]uint32{binary.NativeEndian.Uint32(sum[:]) | 1, binary.NativeEndian.Uint32(sum[4:])}}
}

// remember starts a service port's table. It finds the clients again that an earlier process, or
// an earlier object of the service port, has added.
func (s *Server) remember(p *portService) {
	m := &remembered{server: s, group: s.groupOf(p.name), zero: s.worker.clock}
	p.balancer.SetMirror(m)
	if left, ok := s.inherited[m.group]; ok {
		p.balancer.Restore(left, poll.Nanotime())
		delete(s.inherited, m.group)
	}
}

// inherit reads the clients that an earlier process has added.
func (s *Server) inherit() {
	s.inherited = make(map[bpf.KernelSet][]balancer.Pin)
	var c bpf.KernelClient
	var pin bpf.KernelPin
	for all := s.kernel.Maps.Clients.Iterate(); all.Next(&c, &pin); {
		s.inherited[c.Group] = append(s.inherited[c.Group], balancer.Pin{
			Client: c.Addr.Addr(), Endpoint: bpf.PortOf(pin.Addr, pin.Port), Used: s.worker.loopTime(pin.Used),
		})
	}
	for _, list := range s.inherited {
		slices.SortFunc(list, func(a, b balancer.Pin) int { return cmp.Compare(a.Used, b.Used) })
	}
}

// Pin implements balancer.Mirror.
func (r *remembered) Pin(client netip.Addr, ep netip.AddrPort, used int64) {
	key := bpf.KernelClient{Group: r.group, Addr: bpf.AddressOf(client)}
	pin := bpf.KernelPin{Addr: bpf.AddressOf(ep.Addr()), Port: bpf.Wire(ep.Port()), Used: uint64(used + r.zero)}
	if !r.server.left.Load() { // else the next process has the table
		_ = r.server.kernel.Maps.Clients.Put(&key, &pin) // without it, userspace decides
	}
}

// Unpin implements balancer.Mirror.
func (r *remembered) Unpin(client netip.Addr) {
	key := bpf.KernelClient{Group: r.group, Addr: bpf.AddressOf(client)}
	if !r.server.left.Load() {
		_ = r.server.kernel.Maps.Clients.Delete(&key) // it may be missing
	}
}
