package flow

import (
	"math/rand/v2"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/service"
)

// portTries is how many ports a flow tries if other flows' replies have its tuples.
const portTries = 64

// ports chooses ports: of the node for flows that hide the client's address, and between
// the hooks for flows whose own port is taken.
type ports struct {
	first, count int
	at           int
	replies      [2]uint16 // ports whose replies steering takes for its own (F11); 0 if none
	keep         *sys.PortSet
}

func newPorts(replies [2]uint16) ports {
	p := ports{first: bpf.FirstPort, count: bpf.LastPort - bpf.FirstPort + 1, replies: replies, keep: sys.ReservedPorts()}
	p.at = rand.IntN(p.count)
	return p
}

// next returns another port.
func (p *ports) next() uint16 {
	for range p.count {
		p.at = (p.at + 1) % p.count
		port := uint16(p.first + p.at)
		if !p.keep.Has(port) && !p.reserved(port) {
			return port
		}
	}
	return uint16(p.first)
}

// random returns any port that a flow may have.
func (p *ports) random() uint16 { return uint16(p.first + rand.IntN(p.count)) }

// tableHides reports whether the kernel's table may choose addresses and ports of the node for
// hidden clients: it does not know which ports the administrator reserves.
func tableHides() bool {
	keep := sys.ReservedPorts()
	for port := bpf.FirstPort; port <= bpf.LastPort; port++ {
		if keep.Has(uint16(port)) {
			return false
		}
	}
	return sys.KernelAtLeast(6, 7) // bpf_fib_lookup finds source addresses
}

// setHiding sets or clears a bit of Control.Hides.
func setHiding(k *bpf.Kernel, bit bpf.KernelHiding, to bool) {
	if hides := (*uint32)(&k.Control.Hides); to {
		atomic.OrUint32(hides, uint32(bit))
	} else {
		atomic.AndUint32(hides, ^uint32(bit))
	}
}

// reserved reports whether replies to a client's port would be steered to this node.
func (p *ports) reserved(port uint16) bool {
	return p.replies[1] != 0 && port >= p.replies[0] && port <= p.replies[1]
}

// nodePort returns the port by which an endpoint is asked first, instead of a hidden client or of one on the
// node: hide in bpf/table.h.
func (f *flow) nodePort() uint16 {
	ports, own := &f.worker.ports, bpf.Wire(f.shared().MiddlePort)
	if f.protocol != service.TCP || own < bpf.FirstPort || ports.keep.Has(own) {
		return ports.next()
	}
	return own
}

// movePorts changes the flow's port between the hooks, or its port of the node.
func (f *flow) movePorts() {
	k := f.shared()
	k.MiddlePort = bpf.Wire(f.worker.ports.next())
	k.Options |= bpf.KernelOptionOPTION_MOVED
	if k.Options&(bpf.KernelOptionOPTION_MASQUERADE|bpf.KernelOptionOPTION_NODE) != 0 {
		k.NodePort = bpf.Wire(f.worker.ports.next())
	}
	f.noteSource()
}
