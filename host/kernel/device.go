package kernel

import (
	"fmt"
	"hash/fnv"
	"syscall"
)

// OwnDevice is the name of a proxy's own interface, by which what its kernel flows send to clients on
// the node comes in (package flow).
func OwnDevice(proxy string) string {
	const longest = syscall.IFNAMSIZ - 1
	if proxy == "" {
		return "sluice"
	}
	if len(proxy) > longest {
		h := fnv.New32a()
		_, _ = h.Write([]byte(proxy))
		return fmt.Sprintf("sluice-%08x", h.Sum32())
	}
	return proxy
}
