// Package bpffs makes BPF file systems for tests and benchmarks: this machine may
// have none, and what is pinned in its own is not theirs.
package bpffs

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Open makes one that no mount namespace has, and that other processes can use by its
// path: it ends with this process.
func Open() (path string, closer func(), err error) {
	context, err := unix.Fsopen("bpf", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return "", nil, fmt.Errorf("a BPF file system: %w", err)
	}
	defer unix.Close(context)
	if err := unix.FsconfigCreate(context); err != nil {
		return "", nil, fmt.Errorf("make a BPF file system: %w", err)
	}
	fd, err := unix.Fsmount(context, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return "", nil, fmt.Errorf("mount a BPF file system: %w", err)
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), fd), func() { _ = unix.Close(fd) }, nil
}
