// Package attach keeps BPF programs at both sides of all interfaces of a network namespace, as
// interfaces come and go, and before the programs of others.
package attach

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/cilium/ebpf"
	"github.com/rs/zerolog"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// repairInterval is the time between checks that the programs are still attached.
const repairInterval = 5 * time.Second

// changesPause is the time after a loss of changes until listening starts again, with a look at
// all interfaces.
const changesPause = 100 * time.Millisecond

// Programs are those of one kind of interfaces.
type Programs struct{ Egress, Ingress *ebpf.Program }

// Follower learns the result of each look at the interfaces, on one goroutine.
type Follower interface {
	// Follow receives all interfaces, and those among them that have the programs for Ethernet.
	// Those that are changed may differ from the last call.
	Follow(all, ethernet []netlink.Link, changed func(index int) bool)
	// Changed receives when something has changed that only the Follower sees.
	Changed() <-chan struct{}
	// Check is called each CheckInterval.
	Check()
}

// CheckInterval is how often a Follower checks.
const CheckInterval = 250 * time.Millisecond

// Options say what is attached where.
type Options struct {
	Ethernet Programs                 // for interfaces with a link header of Ethernet
	Bare     func() (Programs, error) // for those without any; it is called when there is one
	Loopback Programs                 // for lo; nil: none
	// Pin returns where the link at one side ("ingress", "egress") of an interface is pinned.
	// It is nil if links end with the process.
	Pin func(side string, index int) (path string)
	// First puts programs before those of another version where links are pinned already.
	First     bool
	Namespace int      // a descriptor; 0 is the process's own
	Follower  Follower // or nil
	Logger    zerolog.Logger

	Filters bool          // tests: as if there were no tcx
	Repair  time.Duration // tests: instead of 5 s
}

// Interfaces keeps the programs at all interfaces: by tcx (Linux 6.6), else by clsact. They run
// before other programs, because one of these may end the processing of a packet, which would then
// be translated in one direction only.
type Interfaces struct {
	options       Options
	nl            *netlink.Handle
	log           zerolog.Logger
	trouble, deaf once.Trouble
	changes       changes
	done          chan struct{}
	running       sync.WaitGroup

	mu      sync.Mutex
	closed  bool
	filters bool          // there is no tcx
	links   map[int]hooks // by interface
}

// hooks are the programs of one interface.
type hooks struct{ ingress, egress hook }

// there reports whether both programs are at the interface.
func (h hooks) there() bool {
	return (h.ingress == nil || h.ingress.there()) && h.egress.there()
}

// release detaches the programs. With keep, they stay if they can without the process.
func (h hooks) release(keep bool) {
	for _, each := range []hook{h.ingress, h.egress} {
		if each != nil {
			each.release(keep)
		}
	}
}

// Open prepares to attach. Start begins, and Close ends it.
func Open(o Options) (*Interfaces, error) {
	if o.Repair == 0 {
		o.Repair = repairInterval
	}
	i := &Interfaces{options: o, log: o.Logger, done: make(chan struct{}), filters: o.Filters, links: make(map[int]hooks)}
	i.changes.namespace = o.Namespace
	var err error
	if i.nl, err = kernel.Open(o.Namespace, syscall.NETLINK_ROUTE); err != nil {
		return nil, err
	}
	return i, nil
}

// Start attaches the programs to all interfaces, and follows these until Close. An error says
// at which interfaces they are not.
func (i *Interfaces) Start() error {
	if err := i.follow(all); err != nil {
		return err
	}
	i.running.Go(i.run)
	return nil
}

// run follows the interfaces.
func (i *Interfaces) run() {
	defer i.changes.end()
	repair := time.NewTicker(i.options.Repair)
	defer repair.Stop()
	begin := time.After(0)
	follower := i.options.Follower
	var check <-chan time.Time
	var others <-chan struct{}
	if follower != nil {
		each := time.NewTicker(CheckInterval)
		defer each.Stop()
		check, others = each.C, follower.Changed()
		follower.Check()
	}
	for {
		changed := all
		select {
		case <-i.done:
			return
		case <-check:
			follower.Check()
			continue
		case <-others:
			changed = none // the follower knows which
		case <-begin:
			if err := i.changes.begin(); err == nil {
				i.deaf.Over()
			} else {
				begin = time.After(i.options.Repair)
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
			i.log.Warn().Err(err).Msg("kernel flows: some interfaces have no program; their clients are relayed")
		}
	}
}

// all is for a look at all interfaces, none for one at new ones alone.
func all(int) bool  { return true }
func none(int) bool { return false }

// follow attaches the programs to interfaces that are new or that lost them, and releases those of
// interfaces that are gone. The ways of changed interfaces may have changed.
func (i *Interfaces) follow(changed func(index int) bool) error {
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
		kind := i.kindOf(a)
		if kind == unknown {
			continue
		}
		there[a.Index] = true
		if i.attachedTo(a.Index) {
			continue
		}
		h, err := i.attach(kind, a.Index)
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
	if f := i.options.Follower; f != nil {
		f.Follow(list, slices.DeleteFunc(slices.Clone(list), func(l netlink.Link) bool {
			_, attached := i.links[l.Attrs().Index]
			return !attached || i.kindOf(l.Attrs()) != ethernet
		}), changed)
	}
	return errors.Join(errs...)
}

// kind is a kind of interfaces.
type kind uint8

const (
	unknown kind = iota // without programs
	loopback
	ethernet
	bare
)

// kindOf returns the kind of an interface.
func (i *Interfaces) kindOf(a *netlink.LinkAttrs) kind {
	if a.Flags&net.FlagLoopback != 0 {
		if i.options.Loopback.Egress == nil {
			return unknown
		}
		return loopback
	}
	switch a.EncapType {
	case "ether":
		return ethernet
	case "none", "ipip", "tunnel6", "sit", "rawip", "ppp":
		return bare
	}
	return unknown
}

// programsFor returns the programs for a kind of interfaces.
func (i *Interfaces) programsFor(k kind) (Programs, error) {
	switch k {
	case loopback:
		return i.options.Loopback, nil
	case bare:
		return i.options.Bare()
	default:
		return i.options.Ethernet, nil
	}
}

func (i *Interfaces) attach(k kind, index int) (h hooks, err error) {
	p, err := i.programsFor(k)
	if err != nil {
		return h, err
	}
	err = sys.InNetNS(i.options.Namespace, func() (err error) {
		// Packets must not go one way if they cannot come back.
		if h.egress, err = i.at(p.Egress, egressSide, index); err == nil && p.Ingress != nil {
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
func (i *Interfaces) at(program *ebpf.Program, s side, index int) (hook, error) {
	if !i.filters {
		path := ""
		if i.options.Pin != nil {
			path = i.options.Pin(s.name, index)
		}
		h, err := attachTCX(path, program, s, index, i.options.First)
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
func (i *Interfaces) attachedTo(index int) bool {
	h, ok := i.links[index]
	if !ok || h.there() {
		return ok
	}
	h.release(false)
	delete(i.links, index)
	return false
}

// Close takes the programs from all interfaces, unless keep says that pins keep them. It may be
// called again.
func (i *Interfaces) Close(keep bool) {
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
	i.nl.Close()
}
