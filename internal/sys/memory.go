package sys

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// memoryLimit is that of this process's control group (cgroup v2), as a container sees it.
const memoryLimit = "/sys/fs/cgroup/memory.max"

// Memory returns how much memory this process can have in bytes: the machine's, or the limit of
// its control group if that is less. It is 0 if the kernel does not say.
func Memory() uint64 {
	var all uint64
	var info unix.Sysinfo_t
	if unix.Sysinfo(&info) == nil {
		all = info.Totalram * uint64(info.Unit)
	}
	b, err := os.ReadFile(memoryLimit)
	if err != nil {
		return all
	}
	limit, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil { // "max"
		return all
	}
	return min(limit, all)
}
