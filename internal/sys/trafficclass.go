package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// dscpMask takes the bits of ECN off: these are a hop's own.
const dscpMask = 0xfc

// receiveClass has a socket tell the DSCP of what it receives: an Inbox by
// Class, an accepted connection by ClientClass.
func receiveClass(fd int, v6 bool, on int) Errno {
	return setByFamily(fd, v6, unix.IP_RECVTOS, unix.IPV6_RECVTCLASS, on)
}

// ClientClass returns the DSCP that the client's packets had when the connection
// was made, as bits of the traffic class; 0 if none. The socket was accepted by one
// of ListenTCP. It must be called once, early: until then each segment over IPv6
// costs more.
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
	for c := b[:min(int(size), len(b))]; len(c) >= unix.SizeofCmsghdr; {
		h, body, rest := nextControl(c)
		if h == nil {
			break
		}
		if isClass(h) && len(body) > 0 {
			class = classOf(body)
		}
		c = rest
	}
	return class
}

// SetClass has a socket's packets carry a DSCP.
func SetClass(fd int, v6 bool, class uint8) Errno {
	return setByFamily(fd, v6, unix.IP_TOS, unix.IPV6_TCLASS, int(class))
}

// nextControl cuts the first of some control messages off; nil if there is none.
func nextControl(c []byte) (h *unix.Cmsghdr, body, rest []byte) {
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

// classOf reads a byte (a datagram's TOS) or an int.
func classOf(body []byte) uint8 {
	if len(body) >= 4 {
		return uint8(*(*int32)(unsafe.Pointer(&body[0]))) & dscpMask
	}
	return body[0] & dscpMask
}
