package sys

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ThreadTime returns the CPU time of the calling thread in nanoseconds.
func ThreadTime() int64 { return clock(unix.CLOCK_THREAD_CPUTIME_ID) }

// Monotonic returns the time of CLOCK_MONOTONIC in nanoseconds, which BPF programs read too.
func Monotonic() int64 { return clock(unix.CLOCK_MONOTONIC) }

func clock(id uintptr) int64 {
	var t unix.Timespec
	_, _, _ = syscall.RawSyscall(unix.SYS_CLOCK_GETTIME, id, uintptr(unsafe.Pointer(&t)), 0)
	return t.Nano()
}
