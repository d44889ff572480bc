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

// silentSlot returns the slot of the socket that answers nothing for a
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

// keySize is that of the keys of both maps of a family: the address and 4 bytes.
var keySize = [redirect.Families]uint32{service.IPv4: 8, service.IPv6: 20}

// destinationKey joins address, port and protocol, the last two in the host's byte
// order, as the program puts them together.
func destinationKey(d service.Destination) []byte {
	k := binary.NativeEndian.AppendUint16(d.Addr.AsSlice(), d.Port)
	return binary.NativeEndian.AppendUint16(k, uint16(redirect.ProtocolNumber(d.Protocol)))
}

// destinationOf is destinationKey backwards.
func destinationOf(k []byte) service.Destination {
	rest := len(k) - 4
	a, _ := netip.AddrFromSlice(k[:rest])
	return service.Destination{Addr: a, Port: binary.NativeEndian.Uint16(k[rest:]),
		Protocol: redirect.ProtocolOf(uint8(binary.NativeEndian.Uint16(k[rest+2:])))}
}

// prefixKey joins a range's length in bits, in the host's byte order, and its
// address.
func prefixKey(p netip.Prefix) []byte {
	return append(binary.NativeEndian.AppendUint32(nil, uint32(p.Bits())), p.Addr().AsSlice()...)
}

// prefixOf is prefixKey backwards.
func prefixOf(k []byte) netip.Prefix {
	a, _ := netip.AddrFromSlice(k[4:])
	return netip.PrefixFrom(a, int(binary.NativeEndian.Uint32(k)))
}

// maps are what the program looks into, those of destinations and ranges by
// family. They have no name in the file system: with the last descriptor of a map
// and of the program they are gone.
type maps struct {
	destinations, ranges [redirect.Families]*ebpf.Map // destination, or longest prefix, to slot
	sockets              *ebpf.Map                    // slot to socket
}

// newMaps makes empty maps that have room for so many destinations and ranges
// of each family, and for so many sockets. Memory is taken as they fill, but
// for tables of pointers: 16 bytes for each destination, 8 for each socket.
func newMaps(destinations, sockets int) (*maps, error) {
	m := new(maps)
	for f, digit := range [redirect.Families]string{"4", "6"} {
		for _, one := range []struct {
			to   **ebpf.Map
			name string
			kind ebpf.MapType
		}{{&m.destinations[f], "sluice_dst", ebpf.Hash}, {&m.ranges[f], "sluice_range", ebpf.LPMTrie}} {
			if err := newMap(one.to, ebpf.MapSpec{Name: one.name + digit, Type: one.kind, KeySize: keySize[f], ValueSize: 4,
				MaxEntries: uint32(destinations), Flags: noPrealloc}); err != nil {
				m.close()
				return nil, err
			}
		}
	}
	// Its values are descriptors when they are written, and the sockets' cookies,
	// of 8 bytes, when they are read.
	if err := newMap(&m.sockets, ebpf.MapSpec{Name: "sluice_sockets", Type: ebpf.SockMap, KeySize: 4, ValueSize: 8, MaxEntries: uint32(sockets)}); err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

func newMap(to **ebpf.Map, spec ebpf.MapSpec) (err error) {
	if *to, err = ebpf.NewMap(&spec); err != nil {
		return fmt.Errorf("BPF map %s: %w", spec.Name, err)
	}
	return nil
}

// noPrealloc is BPF_F_NO_PREALLOC.
const noPrealloc = 1

func (m *maps) close() {
	for f := range redirect.Families {
		_ = m.destinations[f].Close() // a nil one can be closed, too
		_ = m.ranges[f].Close()
	}
	_ = m.sockets.Close()
}

// setDestination says which slot gets a destination, in one step whatever was
// said before.
func (m *maps) setDestination(d service.Destination, s slot) error {
	return put(m.destinations[service.FamilyOf(d.Addr)], destinationKey(d), s)
}

func (m *maps) deleteDestination(d service.Destination) error {
	return remove(m.destinations[service.FamilyOf(d.Addr)], destinationKey(d))
}

// setRange says which slot gets what is sent into a range and to no
// destination of its own.
func (m *maps) setRange(p netip.Prefix, s slot) error {
	return put(m.ranges[service.FamilyOf(p.Addr())], prefixKey(p), s)
}

func (m *maps) deleteRange(p netip.Prefix) error {
	return remove(m.ranges[service.FamilyOf(p.Addr())], prefixKey(p))
}

func put(m *ebpf.Map, key []byte, s slot) error {
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

func remove(m *ebpf.Map, key []byte) error {
	if err := m.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
		return err
	}
	return nil
}

// match reports whether the maps of both families hold what they should: as many
// entries as there are, each with its slot.
func match(m [redirect.Families]*ebpf.Map, count int, want func(key []byte) (slot, bool)) (bool, error) {
	is := func(key []byte, s slot) bool {
		right, is := want(key)
		return is && s == right
	}
	found := 0
	same, err := each(m[service.IPv4], &found, func(k [8]byte, s slot) bool { return is(k[:], s) })
	if same && err == nil {
		same, err = each(m[service.IPv6], &found, func(k [20]byte, s slot) bool { return is(k[:], s) })
	}
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
