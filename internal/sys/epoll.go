package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// EpollEvent is the kernel's struct epoll_event. Fd and Pad are the two halves of
// its 64 bits of user data.
type EpollEvent = unix.EpollEvent

// Events of epoll, and modes of a registration.
const (
	EPOLLIN        = unix.EPOLLIN
	EPOLLPRI       = unix.EPOLLPRI
	EPOLLOUT       = unix.EPOLLOUT
	EPOLLERR       = unix.EPOLLERR
	EPOLLHUP       = unix.EPOLLHUP
	EPOLLRDHUP     = unix.EPOLLRDHUP
	EPOLLET        = unix.EPOLLET & 0xffffffff
	EPOLLEXCLUSIVE = unix.EPOLLEXCLUSIVE
)

// EpollOp is an operation of EpollControl.
type EpollOp int

// The operations of EpollControl.
const (
	EpollAdd    EpollOp = unix.EPOLL_CTL_ADD
	EpollModify EpollOp = unix.EPOLL_CTL_MOD
	EpollDelete EpollOp = unix.EPOLL_CTL_DEL
)

// EpollCreate creates an epoll instance.
func EpollCreate() (int, Errno) {
	r, _, e := syscall.RawSyscall(unix.SYS_EPOLL_CREATE1, unix.EPOLL_CLOEXEC, 0, 0)
	return result(r, e)
}

// EpollControl adds, changes or deletes fd. Its events carry low and high. These
// must be numbers, never Go pointers, which the garbage collector would not see in
// the kernel.
func EpollControl(epfd int, op EpollOp, fd int, events, low, high uint32) Errno {
	ev := EpollEvent{Events: events, Fd: int32(low), Pad: int32(high)}
	_, _, e := syscall.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(epfd), uintptr(op), uintptr(fd), uintptr(unsafe.Pointer(&ev)), 0, 0)
	return e
}

// EpollPoll returns ready events, or waits for events for at most timeout
// milliseconds. The timeout must be short: the Go scheduler does not know that the
// thread waits, so its P does no other work.
func EpollPoll(epfd int, events []EpollEvent, timeout int) (int, Errno) {
	r, _, e := syscall.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), uintptr(timeout), 0, 0)
	return result(r, e)
}

// EpollWait waits for events, at most timeout milliseconds (-1: for ever). The Go
// scheduler can run other goroutines meanwhile.
func EpollWait(epfd int, events []EpollEvent, timeout int) (int, Errno) {
	r, _, e := syscall.Syscall6(unix.SYS_EPOLL_PWAIT, uintptr(epfd), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), uintptr(timeout), 0, 0)
	return result(r, e)
}

// EventFD creates an event counter, with which other threads wake a loop.
func EventFD() (int, Errno) {
	r, _, e := syscall.RawSyscall(unix.SYS_EVENTFD2, 0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK, 0)
	return result(r, e)
}

// Notify adds one to an event counter. An edge-triggered epoll registration reports
// each call, so the counter is never read.
func Notify(fd int) Errno {
	one := uint64(1)
	_, _, e := syscall.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&one)), 8)
	return e
}
