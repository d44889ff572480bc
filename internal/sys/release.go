package sys

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// KernelAtLeast reports whether the kernel is of a version or a later one.
func KernelAtLeast(major, minor int) bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return false
	}
	var is, isMinor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(u.Release[:]), "%d.%d", &is, &isMinor); err != nil {
		return false
	}
	return is > major || is == major && isMinor >= minor
}
