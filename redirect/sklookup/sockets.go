package sklookup

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// listener is a socket that a plan names as a target.
type listener struct {
	family   service.Family
	protocol service.Protocol
	target   redirect.Target
}

func listenerOf(d service.Destination, t redirect.Target) listener {
	return listener{service.FamilyOf(d.Addr), d.Protocol, t}
}

// slots say which socket is where in the map of sockets. The zero value is
// empty.
type slots struct {
	used map[listener]*place
	free []slot
	next slot
}

// place is a slot that is in use.
type place struct {
	slot         slot
	destinations int // that lead to it
}

// take returns the slot of a listener for one more destination, and puts the
// socket there if it was in none.
func (s *slots) take(m *maps, l listener) (slot, error) {
	if p := s.used[l]; p != nil {
		p.destinations++
		return p.slot, nil
	}
	n := max(s.next, firstSlot)
	fresh := len(s.free) == 0
	if !fresh {
		n = s.free[len(s.free)-1]
	}
	if err := m.setSocket(n, l.target.FD); err != nil {
		return 0, fmt.Errorf("listening socket on port %d: %w", l.target.Port, err)
	}
	if fresh {
		s.next = n + 1
	} else {
		s.free = s.free[:len(s.free)-1]
	}
	if s.used == nil {
		s.used = make(map[listener]*place)
	}
	s.used[l] = &place{slot: n, destinations: 1}
	return n, nil
}

// drop undoes take for one destination.
func (s *slots) drop(m *maps, l listener) error {
	p := s.used[l]
	if p == nil {
		return nil
	}
	if p.destinations--; p.destinations > 0 {
		return nil
	}
	delete(s.used, l)
	s.free = append(s.free, p.slot)
	return m.deleteSocket(p.slot)
}

func (m *maps) setSocket(s slot, fd int) error {
	err := m.sockets.Update(uint32(s), uint64(fd), ebpf.UpdateAny)
	switch {
	case errors.Is(err, syscall.E2BIG):
		return fmt.Errorf("the map of sockets has room for %d", m.sockets.MaxEntries())
	case errors.Is(err, syscall.EOPNOTSUPP):
		return fmt.Errorf("BPF takes no such socket: is it Multipath TCP, or not listening: %w", err)
	}
	return err
}

func (m *maps) hasSocket(s slot) (bool, error) {
	var cookie uint64
	err := m.sockets.Lookup(uint32(s), &cookie)
	if errors.Is(err, ebpf.ErrKeyNotExist) {
		return false, nil
	}
	return err == nil, err
}

func (m *maps) deleteSocket(s slot) error {
	err := m.sockets.Delete(uint32(s))
	// A socket that is closed leaves the map by itself; then the kernel says
	// that the argument is not valid.
	if errors.Is(err, ebpf.ErrKeyNotExist) || errors.Is(err, syscall.EINVAL) {
		return nil
	}
	return err
}

// restore puts back the sockets that are missing from the map.
func (s *slots) restore(m *maps, silent silence) (repaired bool, err error) {
	check := func(n slot, fd int) {
		has, lookErr := m.hasSocket(n)
		if lookErr == nil && !has {
			repaired = true
			lookErr = m.setSocket(n, fd)
		}
		err = errors.Join(err, lookErr)
	}
	for l, p := range s.used {
		check(p.slot, l.target.FD)
	}
	for n, fd := range silent {
		check(n, fd)
	}
	return repaired, err
}

// silence has the sockets that drop everything (F9), by slot: a TCP and a UDP socket
// of each family, whose filter drops what is sent to silent destinations.
type silence map[slot]int

// openSilence makes them in a network namespace, on the listeners' loopback
// addresses. A family that the kernel does not have is left out.
func openSilence(namespace int) (silence, error) {
	s := silence{}
	err := sys.InNetNS(namespace, func() error {
		for _, addr := range []netip.Addr{redirect.ListenIPv4, redirect.ListenIPv6} {
			if err := s.add(addr); err != nil && !(addr.Is6() && noIPv6(err)) {
				return fmt.Errorf("the socket for what is silent: %w", err)
			}
		}
		return nil
	})
	if err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// add makes those of one family. They are transparent, as netfilter refuses what
// others get, and keep no byte (F5).
func (s silence) add(addr netip.Addr) error {
	at := netip.AddrPortFrom(addr, 0)
	fd, err := sys.ListenTCP(at, sys.ListenOptions{Transparent: true, Filter: []sys.FilterOp{{Code: sys.FilterReturn}}})
	if err != nil {
		return err
	}
	s[silentRange(addr)] = fd
	if fd, err = sys.BindUDP(at, sys.UDPOptions{Transparent: true, Deaf: true}); err != nil {
		return err
	}
	s[silentRange(addr)+1] = fd
	return nil
}

// noIPv6 reports whether an error means that the kernel, or interface lo, has no IPv6.
func noIPv6(err error) bool {
	return errors.Is(err, syscall.EAFNOSUPPORT) || errors.Is(err, syscall.EADDRNOTAVAIL)
}

// enter puts them into the map of sockets.
func (s silence) enter(m *maps) error {
	for n, fd := range s {
		if err := m.setSocket(n, fd); err != nil {
			return fmt.Errorf("the socket for what is silent: %w", err)
		}
	}
	return nil
}

func (s silence) close() {
	for _, fd := range s {
		sys.Close(fd)
	}
}
