package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ThreadTime returns the CPU time of the calling thread in nanoseconds.
func ThreadTime() int64 {
	var t unix.Timespec
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOCK_GETTIME, unix.CLOCK_THREAD_CPUTIME_ID, uintptr(unsafe.Pointer(&t)), 0)
	return t.Nano()
}
