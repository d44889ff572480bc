package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// dscpMask removes the ECN bits, which belong to each hop.
const dscpMask = 0xfc

// receiveClass makes a socket report the DSCP of received packets: to an Inbox as
// class, for an accepted connection by ClientClass.
func receiveClass(fd int, v6 bool, on int) Errno {
	return setByFamily(fd, v6, unix.IP_RECVTOS, unix.IPV6_RECVTCLASS, on)
}

// ClientClass returns the DSCP of the client's packets in the handshake, as bits of
// the traffic class, or 0. The connection must come from a socket of ListenTCP.
// Call it once and early: until then, each segment over IPv6 costs more.
func ClientClass(fd int, v6 bool) (class uint8) {
	level, option := uintptr(unix.IPPROTO_IP), uintptr(unix.IP_PKTOPTIONS)
	if v6 {
		level, option = unix.IPPROTO_IPV6, unix.IPV6_2292PKTOPTIONS
	}
	var b [64]byte
	size := uint32(len(b))
	_, _, e := syscall.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), level, option, uintptr(unsafe.Pointer(&b)), uintptr(unsafe.Pointer(&size)), 0)
	if v6 {
		receiveClass(fd, v6, 0)
	}
	if e != 0 {
		return 0
	}
	for h, body, rest := nextControl(b[:min(int(size), len(b))]); h != nil; h, body, rest = nextControl(rest) {
		if isClass(h) && len(body) > 0 {
			class = classOf(body)
		}
	}
	return class
}

// SetClass sets the DSCP of a socket's packets.
func SetClass(fd int, v6 bool, class uint8) Errno {
	return setByFamily(fd, v6, unix.IP_TOS, unix.IPV6_TCLASS, int(class))
}

// nextControl splits off the first control message; nil if there is none.
func nextControl(c []byte) (h *unix.Cmsghdr, body, rest []byte) {
	if len(c) < unix.SizeofCmsghdr {
		return nil, nil, nil
	}
	h = (*unix.Cmsghdr)(unsafe.Pointer(&c[0]))
	size := int(h.Len)
	if size < unix.SizeofCmsghdr || size > len(c) {
		return nil, nil, nil
	}
	return h, c[unix.SizeofCmsghdr:size], c[min(unix.CmsgSpace(size-unix.SizeofCmsghdr), len(c)):]
}

func isClass(h *unix.Cmsghdr) bool {
	return h.Level == unix.IPPROTO_IP && h.Type == unix.IP_TOS || h.Level == unix.IPPROTO_IPV6 && h.Type == unix.IPV6_TCLASS
}

// classOf parses a byte (a datagram's TOS) or an int.
func classOf(body []byte) uint8 {
	if len(body) >= 4 {
		return uint8(*(*int32)(unsafe.Pointer(&body[0]))) & dscpMask
	}
	return body[0] & dscpMask
}
