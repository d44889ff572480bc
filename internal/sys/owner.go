package sys

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// socketOwner is a user without processes: Kubernetes starts containers only with
// users below 2^31, and other ways to become this user need CAP_SETUID.
const socketOwner = 0xf0534c43

// Disown changes the owner of an unbound socket to socketOwner. The kernel lets
// sockets of one user share an address (SO_REUSEPORT), so other processes of this
// process's user cannot join it. It needs CAP_CHOWN (EPERM).
func Disown(fd int) Errno {
	_, _, e := syscall.RawSyscall(unix.SYS_FCHOWN, uintptr(fd), socketOwner, ^uintptr(0))
	return e
}

// CanDisown returns nil if Disown works, or if there is nobody to disown sockets for: the user
// namespace, such as that of sluice dev, has only this process's user (EINVAL). Else it
// returns the reason.
func CanDisown() error {
	fd, e := socket(unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDP)
	if e == 0 {
		e = Disown(fd)
		Close(fd)
	}
	if e == 0 || e == unix.EINVAL {
		return nil
	}
	return e
}
