package flow

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/flow/attach"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/flow/bypass"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// shortcutsLast is how long packets take shortcuts after a check. A killed process makes no
// further check.
const shortcutsLast = time.Second

// shortcuts sets which packets of open flows skip the node's IP stack (bpf/shortcut.h): none
// while a hook there, such as a firewall or connection tracking, sees forwarded packets, and
// none at interfaces with another program. It is an attach.Follower.
type shortcuts struct {
	kernel  *bpf.Kernel
	bypass  *bypass.Watcher
	leave   func(end func()) // calls end, soon, and on any goroutine
	leaving atomic.Bool      // leave has not called end
	log     zerolog.Logger
	none    once.Trouble // why no packet takes one
	trouble once.Trouble
	ways    map[int]bypass.Way // of interfaces, as in the map
	node    *nodeClients
}

func openShortcuts(k *bpf.Kernel, namespace int, table string, leave func(end func()), node *nodeClients, log zerolog.Logger) (*shortcuts, error) {
	w, err := bypass.Open(bypass.Options{
		Namespace: namespace, Table: table, Logger: log,
		Programs: []*ebpf.Program{k.Ethernet.Ingress, k.Ethernet.Egress},
		IsOwn:    attach.IsOwnFilter,
	})
	if err != nil {
		return nil, err
	}
	s := &shortcuts{kernel: k, bypass: w, leave: leave, node: node, log: log, ways: make(map[int]bypass.Way)}
	atomic.StoreUint64(&k.Control.ShortcutsUntil, 0)
	var index uint32
	var way bpf.KernelWay
	for each := k.Maps.Ways.Iterate(); each.Next(&index, &way); { // a killed process left them
		s.ways[int(index)] = bypass.Way(way)
	}
	for index := range s.ways {
		s.forget(index)
	}
	return s, nil
}

// Check allows or forbids shortcuts for the next second.
func (s *shortcuts) Check() {
	what, err := s.bypass.InStack()
	if err != nil {
		what = err.Error()
	}
	until, ending := &s.kernel.Control.ShortcutsUntil, &s.kernel.Control.ShortcutsEnding
	switch {
	case what == "" && !s.leaving.Load():
		atomic.StoreUint64(ending, 0)
		atomic.StoreUint64(until, uint64(sys.Monotonic()+int64(shortcutsLast)))
	case what != "" && atomic.LoadUint64(until) != 0 && s.leaving.CompareAndSwap(false, true):
		atomic.StoreUint64(ending, uint64(sys.Monotonic()))
		s.leave(func() {
			atomic.StoreUint64(until, 0)
			s.leaving.Store(false)
		})
	}
	switch first := s.none.New(what); {
	case !first:
	case what != "":
		s.log.Info().Str("because", what).Msg("kernel flows: all packets pass the node's IP stack")
	default:
		s.log.Info().Msg("kernel flows: packets of open connections skip the node's IP stack")
	}
	s.node.check(s.bypass.OnNode()) // reading all rules takes longer: shortcuts have ended before
}

// Changed implements attach.Follower.
func (s *shortcuts) Changed() <-chan struct{} { return s.bypass.Changed() }

// Follow brings the map of ways up to date for some of all interfaces. It looks again at those
// that are changed, or that changed routes lead to.
func (s *shortcuts) Follow(all, some []netlink.Link, changed func(index int) bool) {
	ways, err := s.bypass.Ways(all, some, changed)
	if err = errors.Join(err, s.put(ways)); err == nil {
		s.trouble.Over()
	} else if s.trouble.New(err.Error()) {
		s.log.Warn().Err(err).Msg("kernel flows: packets at some interfaces pass the node's IP stack")
	}
}

// put makes the map have these ways and no others. A new number voids the hops that BPF knows by the ways
// before, and another one those that it finds meanwhile.
func (s *shortcuts) put(ways map[int]bypass.Way) (failed error) {
	atomic.AddUint32(&s.kernel.Control.WaysNumber, 1)
	defer atomic.AddUint32(&s.kernel.Control.WaysNumber, 1)
	for index := range s.ways {
		if _, is := ways[index]; !is {
			s.forget(index)
		}
	}
	for index, way := range ways {
		if was, known := s.ways[index]; known && was == way {
			continue
		}
		if err := s.kernel.Maps.Ways.Update(uint32(index), bpf.KernelWay(way), ebpf.UpdateAny); err != nil {
			failed = errors.Join(failed, err)
			s.forget(index)
			continue
		}
		s.ways[index] = way
	}
	return failed
}

func (s *shortcuts) forget(index int) {
	_ = s.kernel.Maps.Ways.Delete(uint32(index))
	delete(s.ways, index)
}

// close ends all shortcuts: packets take the IP stack again.
func (s *shortcuts) close() {
	atomic.StoreUint64(&s.kernel.Control.ShortcutsUntil, 0)
	s.bypass.Close()
}
