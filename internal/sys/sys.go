// Package sys is the only place with raw system calls.
//
// The calls of the data path are thin: they take and return descriptors, byte
// slices and netip values, report a kernel's error number as it is (0 is
// success), and allocate nothing. Descriptors are non-blocking and
// close-on-exec from birth.
//
// A call that cannot block goes through syscall.RawSyscall, which does not tell
// the Go scheduler about it: on a non-blocking socket it returns within
// microseconds, and telling the scheduler would cost as much as the call. The
// one call that waits, EpollWait with a timeout, does tell it.
//
// Nothing here keeps state; every function may be called from any goroutine.
package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Errno is an error number of the kernel; 0 means success. It is an error, so
// that the few callers who report one can wrap it.
type Errno = syscall.Errno

// The error numbers that the data path tells apart.
const (
	EACCES        = unix.EACCES
	EAGAIN        = unix.EAGAIN
	EINTR         = unix.EINTR
	EIO           = unix.EIO
	EINVAL        = unix.EINVAL
	EINPROGRESS   = unix.EINPROGRESS
	EADDRINUSE    = unix.EADDRINUSE
	EADDRNOTAVAIL = unix.EADDRNOTAVAIL
	ECONNABORTED  = unix.ECONNABORTED
	ECONNREFUSED  = unix.ECONNREFUSED
	ECONNRESET    = unix.ECONNRESET
	EMFILE        = unix.EMFILE
	EMSGSIZE      = unix.EMSGSIZE
	ENFILE        = unix.ENFILE
	ENOBUFS       = unix.ENOBUFS
	ENOMEM        = unix.ENOMEM
	ENOTCONN      = unix.ENOTCONN
	EPERM         = unix.EPERM
	EPIPE         = unix.EPIPE
	ETIMEDOUT     = unix.ETIMEDOUT
)

// anchor gives zero-length buffers an address: the kernel refuses some
// calls with a null pointer even when the length is zero.
var anchor byte

func base(p []byte) unsafe.Pointer {
	if len(p) == 0 {
		return unsafe.Pointer(&anchor)
	}
	return unsafe.Pointer(&p[0])
}

// result turns a raw result into a count (-1 with an error) and an error
// number.
func result(r uintptr, e Errno) (int, Errno) {
	if e != 0 {
		return -1, e
	}
	return int(r), 0
}

// setInt sets an option whose value is an int.
func setInt(fd, level, option, value int) Errno {
	v := int32(value)
	_, _, e := syscall.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(unsafe.Pointer(&v)), 4, 0)
	return e
}

// setByFamily sets the IPv4 or the IPv6 option of one meaning.
func setByFamily(fd int, v6 bool, option4, option6, value int) Errno {
	if v6 {
		return setInt(fd, unix.IPPROTO_IPV6, option6, value)
	}
	return setInt(fd, unix.IPPROTO_IP, option4, value)
}

// setting is a step of preparing a socket.
type setting struct {
	wanted bool
	what   string // for errors
	set    func() Errno
}

// setAll takes the steps that are wanted, in order, and names the one that
// failed.
func setAll(settings []setting) (failed string, e Errno) {
	for _, o := range settings {
		if o.wanted {
			if e := o.set(); e != 0 {
				return o.what, e
			}
		}
	}
	return "", 0
}

// getInt reads an option whose value is an int.
func getInt(fd, level, option int) (int, Errno) {
	var v int32
	size := uint32(4)
	_, _, e := syscall.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(unsafe.Pointer(&v)), uintptr(unsafe.Pointer(&size)), 0)
	return int(v), e
}
