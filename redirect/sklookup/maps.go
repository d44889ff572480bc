package sklookup

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// slot is a place in the map of sockets, and with it the verdict on a
// destination: which socket gets it. No socket is ever in slot 0, which stands
// for refusing.
type slot uint32

// The slots that are always the same. The program counts on UDP coming right
// after TCP.
const (
	refused slot = iota
	silentTCP4
	silentUDP4
	silentTCP6
	silentUDP6
	firstSlot // of listeners
)

// silentSlot gives the slot of the socket that answers nothing for a
// destination.
func silentSlot(d service.Destination) slot {
	s := silentRange(d.Addr)
	if d.Protocol == service.UDP {
		s++
	}
	return s
}

// silentRange is the value of a range that answers nothing.
func silentRange(a netip.Addr) slot {
	if a.Is4() {
		return silentTCP4
	}
	return silentTCP6
}

// destination4 and destination6 are keys of the maps of destinations: address,
// port and protocol, the last two in the host's byte order, as the program puts
// them together.
type (
	destination4 [8]byte
	destination6 [20]byte
)

// prefix4 and prefix6 are keys of the tries: the length in bits, in the host's
// byte order, and the address.
type (
	prefix4 [8]byte
	prefix6 [20]byte
)

func destinationKey4(d service.Destination) (k destination4) {
	a := d.Addr.As4()
	copy(k[:], a[:])
	binary.NativeEndian.PutUint16(k[4:], d.Port)
	binary.NativeEndian.PutUint16(k[6:], uint16(redirect.ProtocolNumber(d.Protocol)))
	return k
}

func (k destination4) destination() service.Destination {
	return service.Destination{
		Addr:     netip.AddrFrom4([4]byte(k[:])),
		Port:     binary.NativeEndian.Uint16(k[4:]),
		Protocol: redirect.ProtocolOf(uint8(binary.NativeEndian.Uint16(k[6:]))),
	}
}

func destinationKey6(d service.Destination) (k destination6) {
	a := d.Addr.As16()
	copy(k[:], a[:])
	binary.NativeEndian.PutUint16(k[16:], d.Port)
	binary.NativeEndian.PutUint16(k[18:], uint16(redirect.ProtocolNumber(d.Protocol)))
	return k
}

func (k destination6) destination() service.Destination {
	return service.Destination{
		Addr:     netip.AddrFrom16([16]byte(k[:])),
		Port:     binary.NativeEndian.Uint16(k[16:]),
		Protocol: redirect.ProtocolOf(uint8(binary.NativeEndian.Uint16(k[18:]))),
	}
}

func prefixKey4(p netip.Prefix) (k prefix4) {
	binary.NativeEndian.PutUint32(k[:], uint32(p.Bits()))
	a := p.Addr().As4()
	copy(k[4:], a[:])
	return k
}

func (k prefix4) prefix() netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom4([4]byte(k[4:])), int(binary.NativeEndian.Uint32(k[:])))
}

func prefixKey6(p netip.Prefix) (k prefix6) {
	binary.NativeEndian.PutUint32(k[:], uint32(p.Bits()))
	a := p.Addr().As16()
	copy(k[4:], a[:])
	return k
}

func (k prefix6) prefix() netip.Prefix {
	return netip.PrefixFrom(netip.AddrFrom16([16]byte(k[4:])), int(binary.NativeEndian.Uint32(k[:])))
}

// maps are what the program looks into. They have no name in the file system:
// with the last descriptor of a map and of the program they are gone.
type maps struct {
	destinations4, destinations6 *ebpf.Map // destination to slot
	ranges4, ranges6             *ebpf.Map // longest prefix to slot
	sockets                      *ebpf.Map // slot to socket
}

// newMaps makes empty maps that have room for so many destinations and ranges
// of each family, and for so many sockets. Memory is taken as they fill, but
// for tables of pointers: 16 bytes for each destination, 8 for each socket.
func newMaps(destinations, sockets int) (*maps, error) {
	m := new(maps)
	for _, one := range []struct {
		to   **ebpf.Map
		spec ebpf.MapSpec
	}{
		{&m.destinations4, ebpf.MapSpec{Name: "sluice_dst4", Type: ebpf.Hash, KeySize: uint32(len(destination4{}))}},
		{&m.destinations6, ebpf.MapSpec{Name: "sluice_dst6", Type: ebpf.Hash, KeySize: uint32(len(destination6{}))}},
		{&m.ranges4, ebpf.MapSpec{Name: "sluice_range4", Type: ebpf.LPMTrie, KeySize: uint32(len(prefix4{}))}},
		{&m.ranges6, ebpf.MapSpec{Name: "sluice_range6", Type: ebpf.LPMTrie, KeySize: uint32(len(prefix6{}))}},
		// Its values are descriptors when they are written, and the sockets'
		// cookies, of 8 bytes, when they are read.
		{&m.sockets, ebpf.MapSpec{Name: "sluice_sockets", Type: ebpf.SockMap, KeySize: 4, ValueSize: 8}},
	} {
		if one.spec.Type == ebpf.SockMap {
			one.spec.MaxEntries = uint32(sockets)
		} else {
			one.spec.MaxEntries = uint32(destinations)
			one.spec.ValueSize = 4
			one.spec.Flags = noPrealloc
		}
		made, err := ebpf.NewMap(&one.spec)
		if err != nil {
			m.close()
			return nil, fmt.Errorf("BPF map %s: %w", one.spec.Name, err)
		}
		*one.to = made
	}
	return m, nil
}

// noPrealloc is BPF_F_NO_PREALLOC.
const noPrealloc = 1

func (m *maps) close() {
	for _, one := range []*ebpf.Map{m.destinations4, m.destinations6, m.ranges4, m.ranges6, m.sockets} {
		_ = one.Close() // a nil one can be closed, too
	}
}

// setDestination says which slot gets a destination, in one step whatever was
// said before.
func (m *maps) setDestination(d service.Destination, s slot) error {
	if d.Addr.Is4() {
		return put(m.destinations4, destinationKey4(d), s)
	}
	return put(m.destinations6, destinationKey6(d), s)
}

func (m *maps) deleteDestination(d service.Destination) error {
	if d.Addr.Is4() {
		return remove(m.destinations4, destinationKey4(d))
	}
	return remove(m.destinations6, destinationKey6(d))
}

// setRange says which slot gets what is sent into a range and to no
// destination of its own.
func (m *maps) setRange(p netip.Prefix, s slot) error {
	if p.Addr().Is4() {
		return put(m.ranges4, prefixKey4(p), s)
	}
	return put(m.ranges6, prefixKey6(p), s)
}

func (m *maps) deleteRange(p netip.Prefix) error {
	if p.Addr().Is4() {
		return remove(m.ranges4, prefixKey4(p))
	}
	return remove(m.ranges6, prefixKey6(p))
}

func put[K comparable](m *ebpf.Map, key K, s slot) error {
	return patiently(func() error { return m.Update(key, uint32(s), ebpf.UpdateAny) })
}

// patiently makes a change again that found no memory. Maps that take memory as
// they fill have a small stock of entries for each CPU, and an interrupt of the
// kernel's own fills it up: where that is slow to come (User Mode Linux has it
// with the next tick), many entries at once empty the stock.
func patiently(change func() error) error {
	err := change()
	for wait := shortestPause; errors.Is(err, syscall.ENOMEM) && wait <= longestPause; wait *= 2 {
		time.Sleep(wait)
		err = change()
	}
	return err
}

// All pauses of one change take half a second together.
const (
	shortestPause = time.Millisecond
	longestPause  = 256 * time.Millisecond
)

func remove[K comparable](m *ebpf.Map, key K) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// matchDestinations tells whether the maps of destinations hold what they
// should: as many as there are, each with its slot.
func (m *maps) matchDestinations(count int, want func(service.Destination) (slot, bool)) (bool, error) {
	found := 0
	same, err := each(m.destinations4, &found, func(k destination4, s slot) bool {
		right, is := want(k.destination())
		return is && s == right
	})
	if err != nil || !same {
		return same, err
	}
	same, err = each(m.destinations6, &found, func(k destination6, s slot) bool {
		right, is := want(k.destination())
		return is && s == right
	})
	return same && found == count, err
}

// matchRanges is the same for the ranges.
func (m *maps) matchRanges(count int, want func(netip.Prefix) (slot, bool)) (bool, error) {
	found := 0
	same, err := each(m.ranges4, &found, func(k prefix4, s slot) bool {
		right, is := want(k.prefix())
		return is && s == right
	})
	if err != nil || !same {
		return same, err
	}
	same, err = each(m.ranges6, &found, func(k prefix6, s slot) bool {
		right, is := want(k.prefix())
		return is && s == right
	})
	return same && found == count, err
}

// batch is how many entries of a map are read by one system call.
const batch = 4096

// each reads a map, counts its entries in found, and stops when is says no.
func each[K comparable](m *ebpf.Map, found *int, is func(K, slot) bool) (all bool, err error) {
	var cursor ebpf.MapBatchCursor
	keys, values := make([]K, batch), make([]uint32, batch)
	for {
		n, err := m.BatchLookup(&cursor, keys, values, nil)
		end := errors.Is(err, ebpf.ErrKeyNotExist)
		if err != nil && !end {
			return false, fmt.Errorf("read the BPF map %s: %w", m, err)
		}
		for i := range n {
			if !is(keys[i], slot(values[i])) {
				return false, nil
			}
		}
		if *found += n; end {
			return true, nil
		}
	}
}
