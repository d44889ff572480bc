package flow

import (
	"errors"
	"strings"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/flow/bypass"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/sys"
)

const (
	// stackInterval is how often it is checked who looks at packets in the IP stack.
	stackInterval = 250 * time.Millisecond
	// shortcutsLast is for how long packets take shortcuts after a check. A process that
	// was killed checks no more.
	shortcutsLast = time.Second
)

// shortcuts tells the programs which packets of open flows may go straight to the interface
// that they leave by (bpf/shortcut.h): none while something in the node's IP stack looks at
// forwarded packets, such as a firewall or connection tracking, and none at interfaces
// where somebody else looks at them. One goroutine uses it.
type shortcuts struct {
	kernel  *bpf
	bypass  *bypass.Watcher
	log     zerolog.Logger
	none    once.Trouble // why no packet takes one
	trouble once.Trouble
	ways    map[int]bypass.Way // of interfaces, as in the map
}

func openShortcuts(k *bpf, namespace int, table string, log zerolog.Logger) (*shortcuts, error) {
	w, err := bypass.Open(bypass.Options{
		Namespace: namespace, Table: table, Logger: log,
		Programs: []*ebpf.Program{k.ethernet.Ingress, k.ethernet.Egress, k.bare.Ingress, k.bare.Egress},
		IsOwn:    func(filter string) bool { return strings.HasPrefix(filter, filterName) },
	})
	if err != nil {
		return nil, err
	}
	s := &shortcuts{kernel: k, bypass: w, log: log, ways: make(map[int]bypass.Way)}
	atomic.StoreUint64(&k.control.ShortcutsUntil, 0)
	var index uint32
	var way kernelWay
	for each := k.Ways.Iterate(); each.Next(&index, &way); { // a killed process left them
		s.ways[int(index)] = bypass.Way(way)
	}
	for index := range s.ways {
		s.forget(index)
	}
	return s, nil
}

// check allows or forbids shortcuts for the next second.
func (s *shortcuts) check() {
	what, err := s.bypass.InStack()
	if err != nil {
		what = err.Error()
	}
	var until uint64
	if what == "" {
		until = uint64(sys.Monotonic() + int64(shortcutsLast))
	}
	atomic.StoreUint64(&s.kernel.control.ShortcutsUntil, until)
	switch first := s.none.New(what); {
	case !first:
	case what != "":
		s.log.Info().Str("because", what).Msg("kernel flows: all packets pass the node's IP stack")
	default:
		s.log.Info().Msg("kernel flows: packets of open connections skip the node's IP stack")
	}
}

// follow brings the map of ways up to date for some of all interfaces. It looks again at those
// that are changed, or that changed routes lead to.
func (s *shortcuts) follow(all, some []netlink.Link, changed func(index int) bool) {
	ways, err := s.bypass.Ways(all, some, changed)
	if err = errors.Join(err, s.put(ways)); err == nil {
		s.trouble.Over()
	} else if s.trouble.New(err.Error()) {
		s.log.Warn().Err(err).Msg("kernel flows: packets at some interfaces pass the node's IP stack")
	}
}

// put makes the map have these ways and no others.
func (s *shortcuts) put(ways map[int]bypass.Way) (failed error) {
	for index := range s.ways {
		if _, is := ways[index]; !is {
			s.forget(index)
		}
	}
	for index, way := range ways {
		if was, known := s.ways[index]; known && was == way {
			continue
		}
		if err := s.kernel.Ways.Update(uint32(index), kernelWay(way), ebpf.UpdateAny); err != nil {
			failed = errors.Join(failed, err)
			s.forget(index)
			continue
		}
		s.ways[index] = way
	}
	return failed
}

func (s *shortcuts) forget(index int) {
	_ = s.kernel.Ways.Delete(uint32(index))
	delete(s.ways, index)
}

// close ends all shortcuts: packets take the IP stack again.
func (s *shortcuts) close() {
	atomic.StoreUint64(&s.kernel.control.ShortcutsUntil, 0)
	s.bypass.Close()
}
