package flow

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/service"
)

// forwardingInterval is the time between two checks of what the node forwards.
const forwardingInterval = time.Second

// Unforwarded says by family why a node does not forward its packets, so that all are
// relayed; nil: it forwards them.
type Unforwarded [2]error

var (
	errForwarding  = errors.New("this node forwards no packets (net.ipv4.ip_forward, net.ipv6.conf.all.forwarding)")
	errForwarding4 = errors.New("net.ipv4.ip_forward is 0")
	errForwarding6 = errors.New("net.ipv6.conf.all.forwarding is 0")
	errNoIPv6      = errors.New("the kernel has no IPv6")
)

// none reports whether nothing is forwarded.
func (u Unforwarded) none() bool { return u[service.IPv4] != nil && u[service.IPv6] != nil }

// families returns which are forwarded, by service.Family.
func (u Unforwarded) families() [2]bool {
	return [2]bool{service.IPv4: u[service.IPv4] == nil, service.IPv6: u[service.IPv6] == nil}
}

// forwarding asks the kernel what a network namespace forwards.
type forwarding struct {
	nl     *netlink.Handle
	socket *nl.SocketHandle
}

func openForwarding(namespace int) (*forwarding, error) {
	in := netns.None()
	if namespace != 0 {
		in = netns.NsHandle(namespace)
	}
	handle, err := kernel.Open(namespace, syscall.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	s, err := nl.GetNetlinkSocketAt(in, netns.None(), syscall.NETLINK_ROUTE)
	if err != nil {
		handle.Close()
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	return &forwarding{handle, &nl.SocketHandle{Socket: s}}, nil
}

func (f *forwarding) close() {
	f.nl.Close()
	f.socket.Close()
}

// ReadForwarding returns what the network namespace of the calling thread forwards.
func ReadForwarding() (Unforwarded, error) {
	f, err := openForwarding(0)
	if err != nil {
		return Unforwarded{}, err
	}
	defer f.close()
	return f.read()
}

// Indices of settings that belong to no interface.
const (
	ofAll     = -1 // NETCONFA_IFINDEX_ALL
	ofDefault = -2
)

// read asks for both families.
func (f *forwarding) read() (u Unforwarded, err error) {
	if u[service.IPv4], err = f.ofIPv4(); err != nil {
		return u, fmt.Errorf("settings of IPv4: %w", err)
	}
	switch settings, err := f.settings(syscall.AF_INET6); {
	case errors.Is(err, syscall.EOPNOTSUPP):
		u[service.IPv6] = errNoIPv6
	case err != nil:
		return u, fmt.Errorf("settings of IPv6: %w", err)
	case !settings[ofAll]: // no other one counts (ip6_forward)
		u[service.IPv6] = errForwarding6
	}
	return u, nil
}

// ofIPv4 returns why IPv4 is not forwarded, or nil. One interface suffices whose packets are
// dropped: clients ask by it, or endpoints behind it answer.
func (f *forwarding) ofIPv4() (why, err error) {
	settings, err := f.settings(syscall.AF_INET)
	if err != nil {
		return nil, err
	}
	if !settings[ofAll] {
		return errForwarding4, nil
	}
	for _, index := range slices.Sorted(maps.Keys(settings)) { // the same one is named each time
		if settings[index] || index == ofDefault || index == loopback {
			continue
		}
		if link, err := f.nl.LinkByIndex(int(index)); err == nil { // else it is gone
			why = cmp.Or(why, fmt.Errorf("net.ipv4.conf.%s.forwarding is 0", link.Attrs().Name))
		}
	}
	return why, nil
}

// settings returns which settings of a family are on, by the interface's index.
func (f *forwarding) settings(family uint8) (map[int32]bool, error) {
	const netconfHeader = 4 // struct netconfmsg, aligned
	const attrIndex, attrForwarding = 1, 2
	const newNetconf, getNetconf = 80, 82 // of rtnetlink
	request := nl.NewNetlinkRequest(getNetconf, syscall.NLM_F_DUMP)
	request.Sockets = map[int]*nl.SocketHandle{syscall.NETLINK_ROUTE: f.socket}
	request.AddRawData([]byte{family, 0, 0, 0})
	answers, err := kernel.Uninterrupted(func() ([][]byte, error) {
		return request.Execute(syscall.NETLINK_ROUTE, newNetconf)
	})
	if err != nil {
		return nil, err
	}
	all := make(map[int32]bool, len(answers))
	for _, a := range answers {
		if len(a) < netconfHeader || a[0] != family {
			continue
		}
		index, on := kernel.Attribute(a[netconfHeader:], attrIndex), kernel.Attribute(a[netconfHeader:], attrForwarding)
		if len(index) == 4 && len(on) == 4 {
			all[int32(binary.NativeEndian.Uint32(index))] = binary.NativeEndian.Uint32(on) != 0
		}
	}
	return all, nil
}

// forwardingWatcher keeps up to date which families the node forwards, and which rules of others
// judge that.
type forwardingWatcher struct {
	ask     *forwarding
	log     zerolog.Logger
	trouble once.Trouble
	why     [2]once.Trouble // by service.Family
	level   zerolog.Level   // of what was so at the start, or has become so
	now     atomic.Pointer[[2]bool]
	changed chan struct{} // has an element if now has changed
	judges  *judges
	done    chan struct{}
	running sync.WaitGroup
}

func openForwardingWatcher(namespace int, judges *judges, log zerolog.Logger) (*forwardingWatcher, error) {
	f, err := openForwarding(namespace)
	if err != nil {
		return nil, err
	}
	w := &forwardingWatcher{ask: f, judges: judges, log: log, level: zerolog.InfoLevel, changed: make(chan struct{}, 1), done: make(chan struct{})}
	w.now.Store(new([2]bool))
	return w, nil
}

// check reads the sysctls, and logs and publishes changes.
func (w *forwardingWatcher) check() (Unforwarded, error) {
	u, err := w.ask.read()
	if err != nil {
		if w.trouble.New(err.Error()) {
			w.log.Warn().Err(err).Msg("kernel flows: whether this node forwards packets is not known")
		}
		return u, err
	}
	w.trouble.Over()
	for f, name := range []string{service.IPv4: "IPv4", service.IPv6: "IPv6"} {
		switch why := u[f]; {
		case why == nil:
			if w.why[f].Over() {
				w.log.Info().Msgf("kernel flows: the node forwards %s again", name)
			}
		case w.why[f].New(why.Error()):
			w.log.WithLevel(w.level).Str("because", why.Error()).Msgf("kernel flows: all of %s is relayed, as the node does not forward it", name)
		}
	}
	w.level = zerolog.WarnLevel
	if now := u.families(); now != *w.now.Load() {
		w.now.Store(&now)
		w.tell()
	}
	return u, nil
}

// tell signals a change to Server.Changed.
func (w *forwardingWatcher) tell() {
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// start checks again and again, until close.
func (w *forwardingWatcher) start() {
	w.running.Go(func() {
		each := time.NewTicker(forwardingInterval)
		defer each.Stop()
		for {
			select {
			case <-w.done:
				return
			case <-each.C:
				_, _ = w.check() // it logs
				if w.judges.check(false) {
					w.tell()
				}
			}
		}
	})
}

func (w *forwardingWatcher) close() {
	close(w.done)
	w.running.Wait()
	w.ask.close()
}
