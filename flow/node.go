package flow

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/flow/bypass"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/service"
)

// nodeClients lets connections of the node's own clients become flows (bpf/node.h) while no other
// program looks at their packets: it would see other packets than with the relay. Otherwise new
// connections are relayed, and open ones stay flows. check belongs to one goroutine, relayed is safe
// for concurrent use.
type nodeClients struct {
	kernel *bpf.Kernel
	device *device // nil: none could be made
	log    zerolog.Logger
	last   time.Duration // for how long new ones are flows after a check
	told   once.Trouble
	why    atomic.Pointer[string] // new ones are relayed; nil: they are not

	masquerade  atomic.Bool // rules masquerade some packets: all get the node's address that routing chooses
	noFragments atomic.Bool // rules may drop what the node fragments: UDP is relayed
	// BPF has both bits in Control.Hides.
}

var errNoShortcut = errors.New("--shortcuts is off")

// openNodeClients makes the device. Without it, all of the node's own clients are relayed.
func openNodeClients(k *bpf.Kernel, o *Options) *nodeClients {
	n := &nodeClients{kernel: k, log: o.Logger, last: shortcutsLast + o.waits.dead}
	atomic.StoreUint64(&k.Control.NodeUntil, 0)
	err := errNoShortcut
	if o.Shortcuts {
		n.device, err = openDevice(o.Namespace, o.Name)
	}
	if err != nil {
		atomic.StoreUint32(&k.Control.NodeDevice, 0)
		n.relay(err.Error())
		return n
	}
	atomic.StoreUint32(&k.Control.NodeDevice, uint32(n.device.index))
	n.relay("it is not known yet what looks at their packets")
	return n
}

// check lets new connections become flows until its next call is overdue, unless they have to be
// relayed.
func (n *nodeClients) check(beside bypass.Node, err error) {
	if n.device == nil {
		return
	}
	if !n.device.there() { // another program has removed it, or set it down
		err = errors.Join(err, n.device.make())
		atomic.StoreUint32(&n.kernel.Control.NodeDevice, uint32(n.device.index))
	}
	why := beside.Relayed
	if err != nil {
		why = err.Error()
	}
	n.set(&n.masquerade, bpf.KernelHidingHIDES_NODE, beside.Masquerade)
	n.set(&n.noFragments, bpf.KernelHidingASKS_NODE_UDP, beside.NoFragments != "")
	if why != "" {
		atomic.StoreUint64(&n.kernel.Control.NodeUntil, 0)
		n.relay(why)
		return
	}
	atomic.StoreUint64(&n.kernel.Control.NodeUntil, uint64(sys.Monotonic()+int64(n.last)))
	if n.why.Swap(nil) != nil {
		n.told.Over()
		n.log.Info().Msg("kernel flows: new connections of the node's own clients are the kernel's")
	}
}

// set stores a flag that follows from others' rules, for userspace and for BPF.
func (n *nodeClients) set(of *atomic.Bool, bit bpf.KernelHiding, to bool) {
	setHiding(n.kernel, bit, to)
	of.Store(to)
}

// relay records why new connections are relayed.
func (n *nodeClients) relay(why string) {
	if was := n.why.Load(); was != nil && *was == why {
		return
	}
	n.why.Store(&why)
	if n.told.New(why) {
		n.log.Info().Str("because", why).Msg("kernel flows: new connections of the node's own clients are relayed")
	}
}

// relayed returns why new connections are relayed, or "".
func (n *nodeClients) relayed() string {
	if why := n.why.Load(); why != nil {
		return *why
	}
	return ""
}

// close makes all new connections relayed. Without keep, the flows have ended, and it removes the
// device.
func (n *nodeClients) close(keep bool) {
	atomic.StoreUint64(&n.kernel.Control.NodeUntil, 0)
	if n.device == nil {
		return
	}
	if !keep {
		if l, err := n.device.nl.LinkByIndex(n.device.index); err == nil {
			_ = n.device.nl.LinkDel(l)
		}
	}
	n.device.close()
	n.device = nil
}

// NodeRelayed says why new connections of the node's own clients are relayed, or returns "". It is
// safe for concurrent use.
func (s *Server) NodeRelayed() string {
	if n := s.node.Load(); n != nil {
		return n.relayed()
	}
	return "kernel flows have not started"
}

// isForNode reports whether the kernel can forward the node's own clients to all endpoints of a port:
// it has a route to each that leads to another host.
func isForNode(port *service.Port, st *state) bool {
	if port.Name.Protocol == service.SCTP {
		return false
	}
	for f := range port.Families {
		for i := range port.Families[f].Endpoints {
			if e := &port.Families[f].Endpoints[i]; e.MayReturn || st.host.Has(e.Addr.Addr()) {
				return false
			}
		}
	}
	return st.host.Known()
}

// leavesToRelay reports whether a first packet is one of the node's own clients that the kernel does not
// forward.
func (w *worker) leavesToRelay(e *bpf.KernelEvent, s *portService) bool {
	if !w.isFromNode(e) {
		return false
	}
	return !s.forNode.Load() || s.path.protocol == service.UDP && w.server.node.Load().noFragments.Load()
}

// isFromNode reports whether a first packet came by the node's own device.
func (w *worker) isFromNode(e *bpf.KernelEvent) bool {
	device := atomic.LoadUint32(&w.kernel.Control.NodeDevice)
	return device != 0 && e.Ifindex == device
}
