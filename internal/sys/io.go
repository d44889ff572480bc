package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Recv reads from a socket. 0 bytes without an error mean the end of the stream,
// unless p is empty.
func Recv(fd int, p []byte) (int, Errno) {
	r, _, e := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(base(p)), uintptr(len(p)), 0, 0, 0)
	return result(r, e)
}

// Peek is Recv that leaves the bytes in the socket.
func Peek(fd int, p []byte) (int, Errno) {
	r, _, e := syscall.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(base(p)), uintptr(len(p)), unix.MSG_PEEK, 0, 0)
	return result(r, e)
}

// Send writes to a socket. It never raises SIGPIPE. With more, the kernel may delay
// an incomplete last segment. Use it only if Shutdown or Close follows at once; the
// FIN then travels in the same segment.
//
// An empty p sends nothing but returns the state of a connecting socket: 0 if
// connected, EAGAIN while connecting, or else the error of the connect.
func Send(fd int, p []byte, more bool) (int, Errno) {
	flags := uintptr(unix.MSG_NOSIGNAL)
	if more {
		flags |= unix.MSG_MORE
	}
	r, _, e := syscall.RawSyscall6(unix.SYS_SENDTO, uintptr(fd), uintptr(base(p)), uintptr(len(p)), flags, 0, 0)
	return result(r, e)
}

// Unread returns how many bytes have arrived in order and were not read, including
// those after urgent data, without the FIN.
func Unread(fd int) (int, Errno) {
	var n int32
	_, _, e := syscall.RawSyscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCINQ, uintptr(unsafe.Pointer(&n)))
	return int(n), e
}

// ShutdownWrite sends a FIN after all written bytes (half-close).
func ShutdownWrite(fd int) Errno {
	_, _, e := syscall.RawSyscall(unix.SYS_SHUTDOWN, uintptr(fd), unix.SHUT_WR, 0)
	return e
}

// Close closes a descriptor and resets a TCP connection of the data path (see
// CloseInOrder). Linux frees the descriptor even after an error, so Close returns
// nothing.
func Close(fd int) {
	syscall.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0)
}

// Splice moves up to n bytes between a socket and a pipe, in either direction,
// without copying. EAGAIN is ambiguous: the socket is empty or full, or the pipe
// is. Splice never sets SPLICE_F_MORE, which delays the last segment for up to 200
// ms (golang/go#10948).
func Splice(from, to, n int) (int, Errno) {
	r, _, e := syscall.RawSyscall6(unix.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n), unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
	return result(r, e)
}

// Pipe creates a pipe.
func Pipe() (r, w int, e Errno) {
	var fds [2]int32
	_, _, e = syscall.RawSyscall(unix.SYS_PIPE2, uintptr(unsafe.Pointer(&fds)), unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	return int(fds[0]), int(fds[1]), e
}

// Write writes to a pipe.
func Write(fd int, p []byte) (int, Errno) {
	r, _, e := syscall.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(base(p)), uintptr(len(p)))
	return result(r, e)
}

// SetPipeSize requests a capacity in bytes and returns the actual one, which the
// kernel rounds up to a power of two of pages. Beyond the user's limit
// (fs.pipe-user-pages-soft), it returns EPERM and the pipe does not change.
func SetPipeSize(fd, bytes int) (int, Errno) {
	r, _, e := syscall.RawSyscall(unix.SYS_FCNTL, uintptr(fd), unix.F_SETPIPE_SZ, uintptr(bytes))
	return result(r, e)
}
