package load

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Strangers are the source addresses of a flood. No host has them. The world
// routes the answers back to the client, which drops them.
var Strangers = netip.MustParsePrefix("172.16.0.0/12")

// flooder sends datagrams at an even rate, each from its own address and port, so
// that each looks like a new client with one datagram. Its meter counts the
// datagrams that it sent.
type flooder struct {
	m      meter
	poll   *poller
	fd     int
	target *sockaddr
	rate   int64 // datagrams a second
	number uint32
	packet [floodHeaders + 8]byte
}

const (
	// floodHeaders is the size of the headers of IPv4 and UDP.
	floodHeaders = 20 + 8
	// floodBurst is the maximum number of datagrams that leave at once. After an
	// unwanted pause the flood does not catch up completely, as this would
	// overflow the queues that all traffic shares.
	floodBurst = 100
)

func newFlooder(spec Spec) (*flooder, error) {
	target := netip.AddrPortFrom(spec.Targets[0], PortUDPFlood)
	if !target.Addr().Is4() {
		return nil, fmt.Errorf("load: a flood is of IPv4, not to %s", target)
	}
	poll, err := newPoller()
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
	if err != nil {
		return nil, fmt.Errorf("raw socket: %w", err)
	}
	f := &flooder{poll: poll, fd: fd, target: newSockaddr(netip.AddrPortFrom(target.Addr(), 0)), rate: int64(spec.Flood)}
	p := f.packet[:]
	// The kernel fills in IPv4's length, checksum and identification; UDP needs no
	// checksum.
	p[0], p[8], p[9] = 4<<4|5, 64, unix.IPPROTO_UDP
	copy(p[16:], target.Addr().AsSlice())
	binary.BigEndian.PutUint16(p[22:], target.Port())
	binary.BigEndian.PutUint16(p[24:], uint16(len(p)-20))
	return f, nil
}

func (f *flooder) meter() *meter { return &f.m }

func (f *flooder) run(w window) {
	f.m.open(w)
	begin, due := now(), int64(0)
	for t := begin; f.m.tick(t); t = now() {
		owed := f.rate*(t-begin)/1e9 - due
		due += owed
		for range min(owed, floodBurst) {
			if errno := f.send(); errno != 0 && errno != unix.ENOBUFS {
				f.m.failed("flood: " + errno.Error())
				break
			}
			f.m.sent++
		}
		f.poll.wait(1) // nothing is watched: it only waits
	}
}

// send sends one datagram from the next stranger.
func (f *flooder) send() unix.Errno {
	f.stranger()
	_, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(f.fd), uintptr(unsafe.Pointer(&f.packet[0])), uintptr(len(f.packet)),
		0, uintptr(f.target.pointer()), f.target.size)
	return errno
}

// stranger writes the next source into the packet. No address repeats within a
// million datagrams.
func (f *flooder) stranger() {
	first := Strangers.Addr().As4()
	f.number++
	binary.BigEndian.PutUint32(f.packet[12:], binary.BigEndian.Uint32(first[:])|f.number%(1<<20))
	binary.BigEndian.PutUint16(f.packet[20:], uint16(1024+f.number%60000))
}
