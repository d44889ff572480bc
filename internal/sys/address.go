package sys

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sockaddr is memory for a struct sockaddr_in or sockaddr_in6 in the kernel's
// layout: family (host order), port (network order), then the address.
type sockaddr [unix.SizeofSockaddrInet6]byte

// put stores a and returns the length. An IPv4-mapped address counts as IPv4. The
// zone is an interface index or name.
func (s *sockaddr) put(a netip.AddrPort) uintptr {
	ip := a.Addr().Unmap()
	binary.BigEndian.PutUint16(s[2:], a.Port())
	if ip.Is4() {
		binary.NativeEndian.PutUint16(s[0:], unix.AF_INET)
		b := ip.As4()
		copy(s[4:], b[:])
		return unix.SizeofSockaddrInet4
	}
	binary.NativeEndian.PutUint16(s[0:], unix.AF_INET6)
	b := ip.As16()
	copy(s[8:], b[:])
	if z := ip.Zone(); z != "" {
		binary.NativeEndian.PutUint32(s[24:], zoneIndex(z))
	}
	return unix.SizeofSockaddrInet6
}

// get returns the address. An IPv4-mapped address is returned as IPv4. The zero
// AddrPort means that it is not an IP address. Only an address with a zone
// (link-local) needs an allocation.
func (s *sockaddr) get() netip.AddrPort {
	port := binary.BigEndian.Uint16(s[2:])
	switch binary.NativeEndian.Uint16(s[0:]) {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(s[4:8])), port)
	case unix.AF_INET6:
		ip := netip.AddrFrom16([16]byte(s[8:24])).Unmap()
		if zone := binary.NativeEndian.Uint32(s[24:]); zone != 0 && ip.IsLinkLocalUnicast() {
			ip = ip.WithZone(strconv.FormatUint(uint64(zone), 10))
		}
		return netip.AddrPortFrom(ip, port)
	}
	return netip.AddrPort{}
}

func zoneIndex(zone string) uint32 {
	if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
		return uint32(n)
	}
	ifi, err := net.InterfaceByName(zone)
	if err != nil {
		return 0
	}
	return uint32(ifi.Index)
}

// Unspecified returns 0.0.0.0 or ::, in a's family.
func Unspecified(a netip.Addr) netip.Addr {
	if family(a) == unix.AF_INET {
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

func family(a netip.Addr) uintptr { return familyOf(!a.Is4() && !a.Is4In6()) }

// Accept accepts the next connection of a listening socket and returns a
// non-blocking, close-on-exec descriptor and the client's address.
func Accept(listener int) (fd int, client netip.AddrPort, e Errno) {
	var s sockaddr
	size := uint32(len(s))
	r, _, e := syscall.RawSyscall6(unix.SYS_ACCEPT4, uintptr(listener), uintptr(unsafe.Pointer(&s)), uintptr(unsafe.Pointer(&size)), unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	if e != 0 {
		return -1, netip.AddrPort{}, e
	}
	return int(r), s.get(), 0
}

// LocalAddr returns a socket's own address. For a steered connection (TPROXY,
// AnyIP), that is the destination that the client used.
func LocalAddr(fd int) (netip.AddrPort, Errno) {
	var s sockaddr
	size := uint32(len(s))
	_, _, e := syscall.RawSyscall(unix.SYS_GETSOCKNAME, uintptr(fd), uintptr(unsafe.Pointer(&s)), uintptr(unsafe.Pointer(&size)))
	if e != 0 {
		return netip.AddrPort{}, e
	}
	return s.get(), 0
}

func bind(fd int, local netip.AddrPort) Errno {
	var s sockaddr
	n := s.put(local)
	_, _, e := syscall.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(&s)), n)
	return e
}

func connect(fd int, remote netip.AddrPort) Errno {
	var s sockaddr
	n := s.put(remote)
	_, _, e := syscall.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&s)), n)
	return e
}

func socket(fam uintptr, kind, protocol int) (int, Errno) {
	r, _, e := syscall.RawSyscall(unix.SYS_SOCKET, fam, uintptr(kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC), uintptr(protocol))
	return result(r, e)
}
