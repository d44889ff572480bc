package sys

import (
	"encoding/binary"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// MessageInfo is what SCTP carries beside the bytes of a message.
type MessageInfo struct {
	PPID      uint32 // payload protocol identifier, in the sender's byte order
	Stream    uint16
	Unordered bool
}

// Received says what SCTPMailbox.Receive found.
type Received uint8

// What there is to receive.
const (
	SCTPMessage     Received = iota // a message, or its last part
	SCTPPart                        // a part of a message: the rest follows
	SCTPUp                          // the handshake is complete
	SCTPLost                        // the association is lost; an error follows
	SCTPRestarted                   // the peer began the association anew
	SCTPShutDown                    // the shutdown that this side began is complete
	SCTPPartLost                    // the rest of a message will not follow
	SCTPOtherNotice                 // another notification
)

// From linux/sctp.h.
const (
	cmsgSndInfo = 2
	cmsgRcvInfo = 3

	sctpUnordered = 1

	msgNotification = 0x8000

	noticeChange          = 0x8001
	noticePartialDelivery = 0x8006
)

// SCTPMailbox sends and receives whole messages with their information, without
// allocation. It is not safe for concurrent use. The well-known libraries hide
// MSG_EOR, so that one cannot tell where a message ends, and allocate for each call.
type SCTPMailbox struct {
	header  unix.Msghdr
	vector  unix.Iovec
	control [64]byte
}

// sndInfo is struct sctp_sndinfo.
type sndInfo struct {
	stream, flags uint16
	ppid          uint32
	context       uint32
	assoc         int32
}

// rcvInfo is the beginning of struct sctp_rcvinfo.
type rcvInfo struct {
	stream, ssn, flags uint16
	_                  uint16
	ppid               uint32
}

// Receive reads the next message, a part of it, or a notification. 0 bytes of a
// SCTPMessage without an error mean that the peer has shut the association down. A
// part ends where p ends, or earlier; all parts of a message follow each other.
func (m *SCTPMailbox) Receive(fd int, p []byte) (n int, kind Received, info MessageInfo, e Errno) {
	m.vector = unix.Iovec{Base: (*byte)(base(p)), Len: uint64(len(p))}
	m.header = unix.Msghdr{Iov: &m.vector, Iovlen: 1, Control: &m.control[0], Controllen: uint64(len(m.control))}
	r, _, e := syscall.RawSyscall(unix.SYS_RECVMSG, uintptr(fd), uintptr(unsafe.Pointer(&m.header)), 0)
	if n, e = result(r, e); e != 0 {
		return n, 0, info, e
	}
	flags := m.header.Flags
	if flags&msgNotification != 0 {
		return n, noticeOf(p[:n]), info, 0
	}
	if n > 0 && flags&unix.MSG_EOR == 0 {
		kind = SCTPPart
	}
	for h, body, rest := nextControl(m.control[:min(int(m.header.Controllen), len(m.control))]); h != nil; h, body, rest = nextControl(rest) {
		if h.Level == unix.IPPROTO_SCTP && h.Type == cmsgRcvInfo && len(body) >= int(unsafe.Sizeof(rcvInfo{})) {
			r := (*rcvInfo)(unsafe.Pointer(&body[0]))
			info = MessageInfo{Stream: r.stream, PPID: r.ppid, Unordered: r.flags&sctpUnordered != 0}
		}
	}
	return n, kind, info, 0
}

// noticeOf tells what a notification says.
func noticeOf(p []byte) Received {
	if len(p) < 10 {
		return SCTPOtherNotice
	}
	switch binary.NativeEndian.Uint16(p) {
	case noticeChange:
		switch binary.NativeEndian.Uint16(p[8:]) {
		case 0:
			return SCTPUp
		case 1, 4: // lost, or never up
			return SCTPLost
		case 2:
			return SCTPRestarted
		case 3:
			return SCTPShutDown
		}
	case noticePartialDelivery:
		return SCTPPartLost
	}
	return SCTPOtherNotice
}

// Send sends a whole message. It never raises SIGPIPE. EAGAIN means that the send
// buffer is full, EMSGSIZE that it is smaller than the message, EINVAL that the peer
// did not grant the stream.
func (m *SCTPMailbox) Send(fd int, p []byte, info MessageInfo) Errno {
	h := (*unix.Cmsghdr)(unsafe.Pointer(&m.control[0]))
	*h = unix.Cmsghdr{Len: uint64(unix.CmsgLen(int(unsafe.Sizeof(sndInfo{})))), Level: unix.IPPROTO_SCTP, Type: cmsgSndInfo}
	s := (*sndInfo)(unsafe.Pointer(&m.control[unix.SizeofCmsghdr]))
	*s = sndInfo{stream: info.Stream, ppid: info.PPID}
	if info.Unordered {
		s.flags = sctpUnordered
	}
	m.vector = unix.Iovec{Base: (*byte)(base(p)), Len: uint64(len(p))}
	m.header = unix.Msghdr{Iov: &m.vector, Iovlen: 1, Control: &m.control[0], Controllen: uint64(unix.CmsgSpace(int(unsafe.Sizeof(sndInfo{}))))}
	_, _, e := syscall.RawSyscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&m.header)), unix.MSG_NOSIGNAL)
	return e
}

// Writable reports whether a socket has room to send.
func Writable(fd int) bool {
	p := unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT}
	var now unix.Timespec
	r, _, e := syscall.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&now)), 0, 0, 0)
	return e == 0 && r == 1 && p.Revents&unix.POLLOUT != 0
}
