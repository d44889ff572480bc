package load

import (
	"encoding/binary"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The load's loops call the kernel without telling Go's scheduler, which keeps a P
// for each of them. They should cost as little as a C program's loops, because
// they share the machine with the relay.

var processStart = time.Now()

// now is the monotonic clock in nanoseconds.
func now() int64 { return int64(time.Since(processStart)) }

func read(fd int, p []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)))
	return int(n), errno
}

func write(fd int, p []byte) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(unsafe.Pointer(&p[0])), uintptr(len(p)), unix.MSG_NOSIGNAL, 0, 0)
	return int(n), errno
}

func closeFD(fd int) {
	_, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0)
}

func accept(fd int) (int, unix.Errno) {
	n, _, errno := unix.RawSyscall6(unix.SYS_ACCEPT4, uintptr(fd), 0, 0, unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0, 0)
	return int(n), errno
}

func setOption(fd, level, name, value int) unix.Errno {
	v := int32(value)
	_, _, errno := unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(name), uintptr(unsafe.Pointer(&v)), 4, 0)
	return errno
}

// resetOnClose makes close send a reset.
func resetOnClose(fd int) {
	linger := unix.Linger{Onoff: 1}
	_, _, _ = unix.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), unix.SOL_SOCKET, unix.SO_LINGER, uintptr(unsafe.Pointer(&linger)), unsafe.Sizeof(linger), 0)
}

// sockaddr is an address in the kernel's format.
type sockaddr struct {
	family   int
	protocol int // IPPROTO_TCP or IPPROTO_SCTP
	size     uintptr
	// receiveBuffer is SO_RCVBUF of sockets that connect to it; 0 for the kernel's.
	receiveBuffer int

	v4 unix.RawSockaddrInet4
	v6 unix.RawSockaddrInet6
}

func newSockaddr(a netip.AddrPort) *sockaddr {
	port := binary.NativeEndian.Uint16(binary.BigEndian.AppendUint16(nil, a.Port()))
	if a.Addr().Is4() {
		return &sockaddr{
			family: unix.AF_INET, protocol: unix.IPPROTO_TCP, size: unix.SizeofSockaddrInet4,
			v4: unix.RawSockaddrInet4{Family: unix.AF_INET, Port: port, Addr: a.Addr().As4()},
		}
	}
	return &sockaddr{
		family: unix.AF_INET6, protocol: unix.IPPROTO_TCP, size: unix.SizeofSockaddrInet6,
		v6: unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: port, Addr: a.Addr().As16()},
	}
}

func (s *sockaddr) pointer() unsafe.Pointer {
	if s.family == unix.AF_INET {
		return unsafe.Pointer(&s.v4)
	}
	return unsafe.Pointer(&s.v6)
}

// overSCTP returns the address for one-to-one SCTP sockets.
func (s *sockaddr) overSCTP() *sockaddr {
	s.protocol = unix.IPPROTO_SCTP
	return s
}

func (s *sockaddr) socket() (int, unix.Errno) {
	n, _, errno := unix.RawSyscall(unix.SYS_SOCKET, uintptr(s.family), unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, uintptr(s.protocol))
	return int(n), errno
}

// noDelay is TCP_NODELAY or SCTP_NODELAY.
func (s *sockaddr) noDelay() [3]int {
	const sctpNoDelay = 3
	if s.protocol == unix.IPPROTO_SCTP {
		return [3]int{unix.IPPROTO_SCTP, sctpNoDelay, 1}
	}
	return [3]int{unix.IPPROTO_TCP, unix.TCP_NODELAY, 1}
}

// dial starts a connection, from source unless it is nil. The kernel chooses the
// port when it knows the peer, so that each peer has the whole range.
func dial(target, source *sockaddr) (int, unix.Errno) {
	fd, errno := target.socket()
	if errno != 0 {
		return -1, errno
	}
	if target.receiveBuffer > 0 {
		if errno := setOption(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, target.receiveBuffer/2); errno != 0 { // the kernel doubles it
			closeFD(fd)
			return -1, errno
		}
	}
	if source != nil {
		setOption(fd, unix.IPPROTO_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
		if _, _, errno := unix.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(source.pointer()), source.size); errno != 0 {
			closeFD(fd)
			return -1, errno
		}
	}
	_, _, errno = unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(target.pointer()), target.size)
	if errno != 0 && errno != unix.EINPROGRESS {
		closeFD(fd)
		return -1, errno
	}
	return fd, 0
}

// listen opens a listening socket that shares its port with other loops.
func listen(addr *sockaddr) (int, unix.Errno) {
	fd, errno := addr.socket()
	if errno != 0 {
		return -1, errno
	}
	for _, o := range [][3]int{
		{unix.SOL_SOCKET, unix.SO_REUSEADDR, 1},
		{unix.SOL_SOCKET, unix.SO_REUSEPORT, 1},
		addr.noDelay(), // accepted sockets inherit it
	} {
		if errno := setOption(fd, o[0], o[1], o[2]); errno != 0 {
			closeFD(fd)
			return -1, errno
		}
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(addr.pointer()), addr.size); errno != 0 {
		closeFD(fd)
		return -1, errno
	}
	if _, _, errno := unix.RawSyscall(unix.SYS_LISTEN, uintptr(fd), 4096, 0); errno != 0 {
		closeFD(fd)
		return -1, errno
	}
	return fd, 0
}

// poller is an epoll instance and the batch of events read last.
type poller struct {
	fd     int
	events [256]unix.EpollEvent
}

func newPoller() (*poller, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, err
	}
	return &poller{fd: fd}, nil
}

func (p *poller) control(op, fd int, events uint32, data int32) unix.Errno {
	ev := unix.EpollEvent{Events: events, Fd: data}
	_, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(p.fd), uintptr(op), uintptr(fd), uintptr(unsafe.Pointer(&ev)), 0, 0)
	return errno
}

func (p *poller) add(fd int, events uint32, data int32) unix.Errno {
	return p.control(unix.EPOLL_CTL_ADD, fd, events, data)
}

func (p *poller) modify(fd int, events uint32, data int32) unix.Errno {
	return p.control(unix.EPOLL_CTL_MOD, fd, events, data)
}

// wait returns the next events; none after the timeout or a signal.
func (p *poller) wait(milliseconds int) []unix.EpollEvent {
	n, _, errno := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(unsafe.Pointer(&p.events[0])), uintptr(len(p.events)), uintptr(milliseconds), 0, 0)
	if errno != 0 {
		return nil
	}
	return p.events[:n]
}
