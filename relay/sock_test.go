package relay

import (
	"testing"

	"golang.org/x/sys/unix"
)

func dup(t *testing.T, fd int) int {
	n, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	unix.SetNonblock(n, true)
	return n
}
