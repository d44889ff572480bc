package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Recv reads from a socket. 0 bytes without an error is the end of the stream
// (for a p that is not empty).
func Recv(fd int, p []byte) (int, Errno) {
	r, _, e := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(base(p)), uintptr(len(p)), 0, 0, 0)
	return result(r, e)
}

// Send writes to a socket. It never raises SIGPIPE. With more set the kernel
// may hold an incomplete last segment back: only for a write that is followed
// by Shutdown or Close at once, whose FIN then travels in the same segment.
//
// An empty p sends nothing but reports what state a connecting socket is in: 0
// connected, EAGAIN still connecting, else why it failed.
func Send(fd int, p []byte, more bool) (int, Errno) {
	flags := uintptr(unix.MSG_NOSIGNAL)
	if more {
		flags |= unix.MSG_MORE
	}
	r, _, e := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(base(p)), uintptr(len(p)), flags, 0, 0)
	return result(r, e)
}

// Unread returns how many bytes have arrived in order and were not yet read,
// those behind urgent data included. The FIN does not count.
func Unread(fd int) (int, Errno) {
	var n int32
	_, _, e := syscall.RawSyscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCINQ, uintptr(unsafe.Pointer(&n)))
	return int(n), e
}

// ShutdownWrite sends FIN after everything that was written: a half-close.
func ShutdownWrite(fd int) Errno {
	_, _, e := syscall.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_WR, 0)
	return e
}

// Close closes a descriptor, and resets a TCP connection of the data path (see
// CloseInOrder). Linux frees it whatever the result says, so that
// there is nothing to repeat and nothing to return.
func Close(fd int) {
	syscall.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0)
}

// Splice moves up to n bytes between a socket and a pipe (either way) without
// copying them. EAGAIN is ambiguous: the socket has nothing to read or no room,
// or the pipe is full or empty. SPLICE_F_MORE is never set: it holds back the
// last segment for up to 200 ms (golang/go#10948).
func Splice(from, to, n int) (int, Errno) {
	r, _, e := syscall.RawSyscall6(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n), unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
	return result(r, e)
}

// Pipe makes a pipe.
func Pipe() (r, w int, e Errno) {
	var fds [2]int32
	_, _, e = syscall.RawSyscall(unix.SYS_PIPE2, uintptr(unsafe.Pointer(&fds)), unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	return int(fds[0]), int(fds[1]), e
}

// SetPipeSize asks for a capacity in bytes and returns the one that the kernel
// gave (it rounds up to a power of two of pages). Over the user's budget
// (fs.pipe-user-pages-soft) it answers EPERM and the pipe stays as it is.
func SetPipeSize(fd, bytes int) (int, Errno) {
	r, _, e := syscall.RawSyscall(unix.SYS_FCNTL, uintptr(fd), unix.F_SETPIPE_SZ, uintptr(bytes))
	return result(r, e)
}
