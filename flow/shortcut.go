package flow

import (
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/cilium/ebpf"
	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"

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
	others  *others
	routes  *routes
	log     zerolog.Logger
	none    once.Trouble // why no packet takes one
	trouble once.Trouble
	ways    map[int]kernelWay // of interfaces, as in the map
}

func openShortcuts(k *bpf, namespace int, table string, log zerolog.Logger) (*shortcuts, error) {
	o, err := openOthers(namespace, table, k.ethernet.Ingress, k.ethernet.Egress, k.bare.Ingress, k.bare.Egress)
	if err != nil {
		return nil, err
	}
	r, err := openRoutes(namespace, routesBuffer, log)
	if err != nil {
		o.close()
		return nil, err
	}
	s := &shortcuts{kernel: k, others: o, routes: r, log: log, ways: make(map[int]kernelWay)}
	atomic.StoreUint64(&k.control.ShortcutsUntil, 0)
	var index uint32
	var way kernelWay
	for each := k.Ways.Iterate(); each.Next(&index, &way); { // a killed process left them
		s.ways[int(index)] = way
	}
	for index := range s.ways {
		s.forget(index)
	}
	return s, nil
}

// check says for the next second whether packets take shortcuts.
func (s *shortcuts) check() {
	what, err := s.others.inStack()
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

// follow finds the ways of interfaces, and forgets those of others. It looks at an interface
// anew if that is changed, or if routes to it are.
func (s *shortcuts) follow(list []netlink.Link, changed func(index int) bool) {
	there := make(map[int]bool, len(list))
	failed, moved := s.others.look(), s.routes.take()
	if failed != nil {
		list = nil // nothing is known of any
	}
	news, err := s.others.peers.look(list, changed)
	failed = errors.Join(failed, err)
	if news { // it is news for bridges too
		changed = all
	}
	for _, l := range list {
		index := l.Attrs().Index
		there[index] = true
		if _, known := s.ways[index]; known && !moved(index) && !changed(index) {
			continue
		}
		ways, err := s.others.at(l)
		if err == nil {
			err = s.put(index, s.routes.limit(l.Attrs(), ways))
		}
		if err != nil {
			failed = errors.Join(failed, fmt.Errorf("%s: %w", l.Attrs().Name, err))
			s.forget(index)
		}
	}
	for index := range s.ways {
		if !there[index] {
			s.forget(index)
		}
	}
	if failed == nil {
		s.trouble.Over()
	} else if s.trouble.New(failed.Error()) {
		s.log.Warn().Err(failed).Msg("kernel flows: packets at some interfaces pass the node's IP stack")
	}
}

func (s *shortcuts) put(index int, ways kernelWay) error {
	if was, known := s.ways[index]; known && was == ways {
		return nil
	}
	if err := s.kernel.Ways.Update(uint32(index), ways, ebpf.UpdateAny); err != nil {
		return err
	}
	s.ways[index] = ways
	return nil
}

func (s *shortcuts) forget(index int) {
	_ = s.kernel.Ways.Delete(uint32(index))
	delete(s.ways, index)
}

// close has all packets pass the IP stack again.
func (s *shortcuts) close() {
	atomic.StoreUint64(&s.kernel.control.ShortcutsUntil, 0)
	s.routes.close()
	s.others.close()
}
