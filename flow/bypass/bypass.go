// Package bypass finds out which packets that the node forwards may skip its IP stack: those
// that nothing else on the node looks at. It changes nothing in the kernel, and takes whatever
// it cannot read for something that looks at packets.
//
// A Watcher has two answers. InStack names what looks at all forwarded packets: a chain of
// nftables, a BPF program of netfilter, iptables-legacy, IPVS or IPsec. Ways returns what may be
// skipped at each interface: programs, filters, queueing disciplines, XDP programs of pods
// (peer.go) and the MTUs of routes (routes.go) decide about that.
package bypass

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"
)

// Way is a set of ways past the IP stack that packets may take at an interface. The numbers
// are those of WAY_ in flow/bpf/layout.h.
type Way uint32

// The ways.
const (
	From Way = 1 << iota // packets that arrive at the interface
	Into                 // packets that leave by it
	Peer                 // packets that leave by it go straight to its peer

	// Watched is no way: another program sees what arrives at the interface.
	Watched Way = 1 << 8
)

// Options say which network namespace to look at, and what of it is Sluice's own.
type Options struct {
	Namespace int                      // a descriptor; 0 is the process's own
	Table     string                   // of nftables' family inet
	Programs  []*ebpf.Program          // at tcx
	IsOwn     func(filter string) bool // by the names of clsact's filters
	Logger    zerolog.Logger
}

// Watcher knows the ways of interfaces. It is for one goroutine.
type Watcher struct {
	others *others
	routes *routes
	ways   map[int]Way // by interface, as Ways returned them
}

// Open begins to follow the routes. Close ends that.
func Open(o Options) (*Watcher, error) {
	others, err := openOthers(o.Namespace, o.Table, o.IsOwn, o.Programs...)
	if err != nil {
		return nil, err
	}
	routes, err := openRoutes(o.Namespace, routesBuffer, o.Logger)
	if err != nil {
		others.close()
		return nil, err
	}
	return &Watcher{others: others, routes: routes}, nil
}

// Close releases what Open has opened.
func (w *Watcher) Close() {
	w.routes.close()
	w.others.close()
}

// Changed receives when a change of routes may change the ways of known interfaces.
func (w *Watcher) Changed() <-chan struct{} { return w.routes.changed }

// InStack names what looks at forwarded packets in the node's IP stack, or returns "". An error
// says what cannot be read.
func (w *Watcher) InStack() (string, error) { return w.others.inStack() }

// OnNode says what becomes of the node's own connections. An error says what cannot be read. Call
// Ways and InStack before: it uses what they have read.
func (w *Watcher) OnNode() (Node, error) {
	for index, way := range w.ways {
		if way&Watched != 0 {
			return Node{Relayed: fmt.Sprintf("another program at the ingress of interface %d", index)}, nil
		}
	}
	return w.others.ofNode()
}

// Ways returns the ways of some interfaces, by their index; all are those of the namespace. It
// looks again at interfaces that are new or changed, and at those that changed routes lead to.
// Interfaces that an error is about have no ways.
func (w *Watcher) Ways(all, some []netlink.Link, changed func(index int) bool) (map[int]Way, error) {
	w.routes.look(all)
	failed, moved := w.others.look(), w.routes.take()
	if failed != nil {
		some = nil // nothing is known of any
	}
	news, err := w.others.peers.look(some, changed) // news concern bridges too
	failed = errors.Join(failed, err)
	ways := make(map[int]Way, len(some))
	for _, l := range some {
		index := l.Attrs().Index
		if was, known := w.ways[index]; known && !news && !moved(index) && !changed(index) {
			ways[index] = was
			continue
		}
		way, err := w.others.at(l)
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", l.Attrs().Name, err))
			continue
		}
		ways[index] = w.routes.limit(l.Attrs(), way)
	}
	w.ways = ways
	return ways, failed
}
