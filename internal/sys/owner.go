package sys

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// socketOwner is a user that no process has: Kubernetes starts containers with
// users below 2^31 only, and every other way to become this one needs
// CAP_SETUID.
const socketOwner = 0xf0534c43

// Disown returns a socket that is not bound yet to a user that nobody is. The
// kernel lets sockets of one user share an address (SO_REUSEPORT), so that other
// processes of this process's user cannot join it. It needs CAP_CHOWN (EPERM).
func Disown(fd int) Errno {
	_, _, e := syscall.RawSyscall(unix.SYS_FCHOWN, uintptr(fd), socketOwner, ^uintptr(0))
	return e
}

// CanDisown tells why Disown cannot be done; nil if it can.
func CanDisown() error {
	fd, e := socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDP)
	if e == 0 {
		e = Disown(fd)
		Close(fd)
	}
	if e != 0 {
		return e
	}
	return nil
}
