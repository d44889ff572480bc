// Package sys is the only package with raw system calls.
//
// The functions of the data path are thin. They take and return descriptors, byte
// slices and netip values, return the kernel's error number unchanged (0 is
// success), and do not allocate. Descriptors are non-blocking and close-on-exec
// from their creation.
//
// System calls that cannot block use syscall.RawSyscall, which does not inform the
// Go scheduler: on a non-blocking socket they return within microseconds, and
// informing the scheduler would cost as much as the call. EpollWait, which waits,
// informs it.
//
// The package has no state. All functions are safe for concurrent use.
package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Errno is an error number of the kernel; 0 means success. It implements error, so
// that callers can wrap it.
type Errno = syscall.Errno

// The error numbers that the data path distinguishes.
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
	EHOSTUNREACH  = unix.EHOSTUNREACH
	EMSGSIZE      = unix.EMSGSIZE
	ENFILE        = unix.ENFILE
	ENOBUFS       = unix.ENOBUFS
	ENOMEM        = unix.ENOMEM
	ENOTCONN      = unix.ENOTCONN
	EPERM         = unix.EPERM
	EPIPE         = unix.EPIPE
	ETIMEDOUT     = unix.ETIMEDOUT
)

// anchor provides an address for empty buffers: some system calls reject a null
// pointer even for length 0.
var anchor byte

func base(p []byte) unsafe.Pointer {
	if len(p) == 0 {
		return unsafe.Pointer(&anchor)
	}
	return unsafe.Pointer(&p[0])
}

// result converts a raw result to a count (-1 after an error) and an error number.
func result(r uintptr, e Errno) (int, Errno) {
	if e != 0 {
		return -1, e
	}
	return int(r), 0
}

// setInt sets an int option.
func setInt(fd, level, option, value int) Errno {
	v := int32(value)
	return setOption(fd, level, option, &v)
}

// setOption sets an option whose value has the kernel's layout.
func setOption[T any](fd, level, option int, value *T) Errno {
	_, _, e := syscall.RawSyscall6(unix.SYS_SETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(unsafe.Pointer(value)), unsafe.Sizeof(*value), 0)
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

// getInt returns an int option.
func getInt(fd, level, option int) (int, Errno) {
	var v int32
	e := getOption(fd, level, option, &v)
	return int(v), e
}

// getOption reads an option whose value has the kernel's layout.
func getOption[T any](fd, level, option int, value *T) Errno {
	size := uint32(unsafe.Sizeof(*value))
	_, _, e := syscall.RawSyscall6(unix.SYS_GETSOCKOPT, uintptr(fd), uintptr(level), uintptr(option), uintptr(unsafe.Pointer(value)), uintptr(unsafe.Pointer(&size)), 0)
	return e
}

// familyOf returns the address family of IPv6 or IPv4.
func familyOf(v6 bool) uintptr {
	if v6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}
