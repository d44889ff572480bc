package load

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
)

// floodSources is where a flood says that it comes from: the upper half of the
// clients' network, where nobody is. So nobody answers, and nobody is asked for a
// neighbour's address as long as the server is silent.
var floodSources = netip.MustParsePrefix("10.1.128.0/17")

// flooder sends datagrams at a steady rate to a service that nobody else uses,
// each from an address and port of its own: each is a new client to whatever
// keeps sessions.
type flooder struct {
	m      meter
	fd     int
	rate   int // datagrams a second
	packet [20 + 8 + 16]byte
	number uint32
}

func newFlooder(spec Spec) (*flooder, error) {
	target := spec.Targets[0]
	if !target.Is4() {
		return nil, errors.New("load: a flood is of IPv4 alone")
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, unix.IPPROTO_RAW)
	if err == nil {
		err = unix.Connect(fd, &unix.SockaddrInet4{Addr: target.As4()})
	}
	if err != nil {
		return nil, fmt.Errorf("load: flood: %w", err)
	}
	f := &flooder{fd: fd, rate: spec.Flood}
	p := f.packet[:]
	p[0], p[8], p[9] = 4<<4|5, 64, unix.IPPROTO_UDP
	copy(p[16:], target.AsSlice())
	binary.BigEndian.PutUint16(p[22:], PortUDPFlood)
	binary.BigEndian.PutUint16(p[24:], uint16(len(p)-20)) // without a checksum, which IPv4 allows
	return f, nil
}

func (f *flooder) meter() *meter { return &f.m }

// run sends each millisecond what is due by then.
func (f *flooder) run(w window) {
	f.m.open(w)
	last, due := now(), 0.0
	for t := last; f.m.tick(t); t = now() {
		due += float64(t-last) / 1e9 * float64(f.rate)
		last = t
		// What was not sent while this thread had to wait is not made up for.
		for due = min(due, float64(f.rate)/100); due >= 1; due-- {
			f.send()
		}
		_, _ = unix.Poll(nil, 1)
	}
}

func (f *flooder) send() {
	first := f.packet
	source := binary.BigEndian.Uint32(floodSources.Addr().AsSlice())
	f.number++
	// Neighbouring numbers are neighbouring addresses; after all of those come
	// others of their ports.
	const addresses = 1<<15 - 2
	binary.BigEndian.PutUint32(first[12:], source+1+f.number%addresses)
	binary.BigEndian.PutUint16(first[20:], uint16(1024+f.number/addresses%60000))
	if _, errno := write(f.fd, first[:]); errno == 0 && f.m.start != 0 {
		f.m.sent++
	}
}
