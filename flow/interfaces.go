package flow

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/service"
)

// repairInterval is how often it is checked that the programs are where they should be.
const repairInterval = 5 * time.Second

// oldPins is how long programs of another version go on for their connections.
const oldPins = time.Hour

// changesPause is how long after a loss changes are listened for again. Then all is looked at.
const changesPause = 100 * time.Millisecond

// interfaces keeps the programs at all interfaces but lo: by tcx (Linux 6.6), else by clsact. They come before
// those of others: one that ends the look at a packet would leave it untranslated in one
// direction.
type interfaces struct {
	ethernet, bare *kernelPrograms
	pins           *pins // nil if links end with the process
	namespace      int
	nl             *netlink.Handle
	log            zerolog.Logger
	trouble, deaf  once.Trouble
	changes        changes
	repair, old    time.Duration // repairInterval, oldPins
	done           chan struct{}
	running        sync.WaitGroup
	shortcuts      *shortcuts // nil if packets take none

	mu      sync.Mutex
	closed  bool
	filters bool          // there is no tcx
	links   map[int]hooks // by interface
}

// hooks are the programs of one interface.
type hooks struct{ ingress, egress hook }

// there reports whether both programs are at the interface.
func (h hooks) there() bool { return h.ingress.there() && h.egress.there() }

// release lets go of the programs. With keep, they stay if they can without the process.
func (h hooks) release(keep bool) {
	for _, each := range []hook{h.ingress, h.egress} {
		if each != nil {
			each.release(keep)
		}
	}
}

func openInterfaces(k *bpf, p *pins, namespace int, log zerolog.Logger) (*interfaces, error) {
	i := &interfaces{ethernet: &k.ethernet, bare: &k.bare, pins: p, namespace: namespace, log: log, done: make(chan struct{}), links: make(map[int]hooks)}
	i.changes.namespace = namespace
	i.repair, i.old = repairInterval, oldPins
	var err error
	if i.nl, err = kernel.Open(namespace, syscall.NETLINK_ROUTE); err != nil {
		return nil, err
	}
	return i, nil
}

// start follows the interfaces until close.
func (i *interfaces) start() {
	i.running.Go(func() {
		defer i.changes.end()
		repair := time.NewTicker(i.repair)
		defer repair.Stop()
		old := time.After(i.old)
		begin := time.After(0)
		var stack <-chan time.Time
		var routes <-chan struct{}
		if i.shortcuts != nil {
			each := time.NewTicker(stackInterval)
			defer each.Stop()
			stack, routes = each.C, i.shortcuts.bypass.Changed()
			i.shortcuts.check()
		}
		for {
			changed := all
			select {
			case <-i.done:
				return
			case <-stack:
				i.shortcuts.check()
				continue
			case <-routes:
				changed = none // shortcuts know which
			case <-old:
				if i.pins != nil {
					if err := i.pins.removeOthers(); err != nil {
						i.log.Warn().Err(err).Msg("kernel flows: pins of an earlier version stay")
					}
				}
				continue
			case <-begin:
				if err := i.changes.begin(); err == nil {
					i.deaf.Over()
				} else {
					begin = time.After(i.repair)
					if i.deaf.New(err.Error()) {
						i.log.Warn().Err(err).Msg("kernel flows: new interfaces are found late")
					}
				}
			case u, ok := <-i.changes.updates:
				if !ok { // the kernel has dropped some
					i.log.Debug().Msg("kernel flows: too many changes of interfaces at once; all are looked at")
					i.changes.end()
					begin = time.After(changesPause)
					continue
				}
				indices := i.changes.waiting(u)
				changed = func(index int) bool { return indices[index] }
			case <-repair.C:
			}
			err := i.follow(changed)
			if err == nil {
				i.trouble.Over()
			} else if i.trouble.New(err.Error()) {
				i.log.Warn().Err(err).Msg("kernel flows: not at all interfaces; their clients are relayed")
			}
		}
	})
}

// all is for a look at all interfaces, none for one at new ones alone.
func all(int) bool  { return true }
func none(int) bool { return false }

// follow attaches the programs to the interfaces that are new, or that somebody took them
// from, and lets go of those that are gone. Those that are changed may have other ways.
func (i *interfaces) follow(changed func(index int) bool) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.closed {
		return nil
	}
	list, err := kernel.Uninterrupted(i.nl.LinkList)
	if err != nil {
		return fmt.Errorf("interfaces: %w", err)
	}
	there := make(map[int]bool, len(list))
	var errs []error
	for _, l := range list {
		a := l.Attrs()
		programs := i.programsFor(a)
		if programs == nil {
			continue
		}
		there[a.Index] = true
		if i.attachedTo(a.Index) {
			continue
		}
		h, err := i.attach(programs, a.Index)
		switch {
		case errors.Is(err, syscall.ENODEV): // gone meanwhile
		case err != nil:
			errs = append(errs, fmt.Errorf("attach to %s: %w", a.Name, err))
		default:
			i.links[a.Index] = h
		}
	}
	for index, h := range i.links {
		if !there[index] {
			h.release(false)
			delete(i.links, index)
		}
	}
	if i.shortcuts != nil {
		i.shortcuts.follow(list, slices.DeleteFunc(slices.Clone(list), func(l netlink.Link) bool {
			_, attached := i.links[l.Attrs().Index]
			return !attached || i.programsFor(l.Attrs()) != i.ethernet
		}), changed)
	}
	return errors.Join(errs...)
}

// programsFor returns the programs for an interface, or nil if there are none.
func (i *interfaces) programsFor(a *netlink.LinkAttrs) *kernelPrograms {
	if a.Flags&net.FlagLoopback != 0 {
		return nil
	}
	switch a.EncapType {
	case "ether":
		return i.ethernet
	case "none", "ipip", "tunnel6", "sit", "rawip", "ppp":
		return i.bare
	}
	return nil
}

func (i *interfaces) attach(p *kernelPrograms, index int) (h hooks, err error) {
	err = sys.InNetNS(i.namespace, func() (err error) {
		// Without the way back there must be no way there.
		if h.egress, err = i.at(p.Egress, egressSide, index); err == nil {
			h.ingress, err = i.at(p.Ingress, ingressSide, index)
		}
		return err
	})
	if err != nil {
		h.release(false)
	}
	return h, err
}

// at attaches a program to one side of an interface.
func (i *interfaces) at(program *ebpf.Program, s side, index int) (hook, error) {
	if !i.filters {
		h, err := attachTCX(i.pins, program, s, index)
		if err == nil {
			return h, nil
		}
		if !errors.Is(err, ebpf.ErrNotSupported) {
			return nil, err
		}
		i.filters = true
	}
	h, err := attachFilter(i.nl, program, s, index)
	if err != nil {
		return nil, err // not a hook that is nil inside
	}
	return h, nil
}

// attachedTo reports whether both programs are at an interface.
func (i *interfaces) attachedTo(index int) bool {
	h, ok := i.links[index]
	if !ok || h.there() {
		return ok
	}
	h.release(false)
	delete(i.links, index)
	return false
}

// close takes the programs from all interfaces, unless keep says that pins keep them.
func (i *interfaces) close(keep bool) {
	i.mu.Lock()
	if i.closed {
		i.mu.Unlock()
		return
	}
	i.closed = true
	for index, h := range i.links {
		h.release(keep)
		delete(i.links, index)
	}
	close(i.done)
	i.mu.Unlock()
	i.running.Wait()
	if i.shortcuts != nil {
		i.shortcuts.close()
	}
	i.nl.Close()
}

// forwarding reports whether this network namespace forwards packets of a family.
func forwarding(f service.Family) bool {
	b, err := os.ReadFile(forwardingFile(f))
	return err == nil && strings.TrimSpace(string(b)) != "0"
}

func forwardingFile(f service.Family) string {
	if f == service.IPv6 {
		return "/proc/sys/net/ipv6/conf/all/forwarding"
	}
	return "/proc/sys/net/ipv4/ip_forward"
}
