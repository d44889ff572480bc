package sys

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// KeepMounts keeps later mounts of this process from other mount namespaces. The process
// must have one of its own.
func KeepMounts() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("keep mounts private: %w", err)
	}
	return nil
}

// Bind mounts a file or directory over another one.
func Bind(from, over string) error {
	if err := unix.Mount(from, over, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s over %s: %w", from, over, err)
	}
	return nil
}
