package flow

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/sluice-proxy/sluice/flow/attach"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/bpffs"
)

// Cleanup removes what a process left at interfaces and pinned: its connections end. It returns
// a line for each kind of what it removed.
func Cleanup(root, proxy string, namespace int) (removed []string, err error) {
	if nl, errOpen := kernel.Open(namespace, syscall.NETLINK_ROUTE); errOpen == nil {
		var n int
		if n, err = attach.RemoveFilters(nl); n > 0 {
			removed = append(removed, fmt.Sprintf("%d filters of kernel flows", n))
		}
		if removeDevice(nl, proxy) {
			removed = append(removed, "interface "+kernel.OwnDevice(proxy)+" of kernel flows")
		}
		nl.Close()
	}
	dir, errDir := bpffs.Of(root, proxy, namespace)
	if errDir != nil {
		return removed, err // nothing can be pinned there
	}
	n, errPins := bpf.RemovePins(dir)
	if n > 0 {
		removed = append(removed, fmt.Sprintf("%d maps, programs and links of kernel flows in %s", n, dir))
	}
	dir.Remove()
	return removed, errors.Join(err, errPins)
}
