package attach

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
)

// hook is a program at one side of an interface.
type hook interface {
	// there reports whether it is still at the interface.
	there() bool
	// release detaches the program. With keep, it stays if it can stay without the process.
	release(keep bool)
}

// side is where packets enter an interface, or leave it.
type side struct {
	name   string // in pins and names of filters
	tcx    ebpf.AttachType
	parent uint32 // of clsact's filters
}

var (
	ingressSide = side{"ingress", ebpf.AttachTCXIngress, netlink.HANDLE_MIN_INGRESS}
	egressSide  = side{"egress", ebpf.AttachTCXEgress, netlink.HANDLE_MIN_EGRESS}
)

// tcxHook is a link of tcx (Linux 6.6).
type tcxHook struct {
	link  link.Link
	index int
}

// attachTCX attaches a program to an interface of the calling thread's namespace, before other
// programs. A link that an earlier process has pinned at path gets the program; with first, a new link
// takes its place, as programs of another version may be before it. Without a path, the link ends with
// the process.
func attachTCX(path string, program *ebpf.Program, s side, index int, first bool) (hook, error) {
	o := link.TCXOptions{Interface: index, Program: program, Attach: s.tcx, Anchor: link.Head()}
	if path == "" {
		l, err := link.AttachTCX(o)
		if err != nil {
			return nil, err
		}
		return &tcxHook{l, index}, nil
	}
	if l, err := link.LoadPinnedLink(path, nil); err == nil {
		if h := (&tcxHook{l, index}); !first && h.there() && l.Update(program) == nil {
			return h, nil
		}
		defer func() { _ = l.Close() }() // it ends once the next one is there
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("replace a pin: %w", err)
	}
	l, err := link.AttachTCX(o)
	if err != nil {
		return nil, err
	}
	if err := l.Pin(path); err != nil {
		_ = l.Close()
		return nil, fmt.Errorf("pin: %w", err)
	}
	return &tcxHook{l, index}, nil
}

func (h *tcxHook) there() bool {
	info, err := h.link.Info()
	return err == nil && info.TCX() != nil && int(info.TCX().Ifindex) == h.index
}

func (h *tcxHook) release(keep bool) {
	if !keep {
		_ = h.link.Unpin()
	}
	_ = h.link.Close()
}

const (
	// filterName begins the names of filters.
	filterName = "sluice-flows-"
	// filterHandle distinguishes them from other programs' filters of the same priority, the
	// first. Among those the kernel puts the newest first.
	filterHandle = 0x51ce
)

// filterHook is a filter of a clsact queueing discipline, where there is no tcx. It stays
// when the process ends, and the next process replaces it.
type filterHook struct {
	nl     *netlink.Handle
	filter *netlink.BpfFilter
	alone  bool // the queueing discipline is ours
}

// attachFilter attaches a program to an interface by a filter.
func attachFilter(nl *netlink.Handle, program *ebpf.Program, s side, index int) (hook, error) {
	h := &filterHook{nl: nl, filter: &netlink.BpfFilter{
		FilterAttrs: netlink.FilterAttrs{
			LinkIndex: index, Parent: s.parent, Handle: filterHandle, Priority: 1, Protocol: syscall.ETH_P_ALL,
		},
		Fd: program.FD(), Name: filterName + s.name, DirectAction: true,
	}}
	switch err := nl.QdiscAdd(clsact(index)); {
	case err == nil:
		h.alone = true
	case !errors.Is(err, syscall.EEXIST):
		return nil, fmt.Errorf("clsact: %w", err)
	}
	if err := nl.FilterReplace(h.filter); err != nil {
		if h.alone {
			_ = nl.QdiscDel(clsact(index))
		}
		return nil, fmt.Errorf("clsact: filter: %w", err)
	}
	return h, nil
}

func clsact(index int) netlink.Qdisc {
	return &netlink.GenericQdisc{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT},
		QdiscType:  "clsact",
	}
}

func (h *filterHook) there() bool {
	found, _ := ownFilters(h.nl, h.filter.LinkIndex, h.filter.Parent)
	return found != nil
}

func (h *filterHook) release(keep bool) {
	if keep {
		return
	}
	_ = h.nl.FilterDel(h.filter)
	if h.alone {
		removeIfEmpty(h.nl, h.filter.LinkIndex)
	}
}

// ownFilters returns this package's filter at one side of an interface, or nil, and how
// many others have.
func ownFilters(nl *netlink.Handle, index int, parent uint32) (own *netlink.BpfFilter, others int) {
	list, err := kernel.Uninterrupted(func() ([]netlink.Filter, error) {
		return nl.FilterList(&netlink.Dummy{LinkAttrs: netlink.LinkAttrs{Index: index}}, parent)
	})
	if err != nil {
		return nil, 1
	}
	for _, f := range list {
		if b, is := f.(*netlink.BpfFilter); is && IsOwnFilter(b.Name) {
			own = b
		} else {
			others++
		}
	}
	return own, others
}

// removeIfEmpty removes a clsact queueing discipline without filters.
func removeIfEmpty(nl *netlink.Handle, index int) {
	for _, s := range []side{ingressSide, egressSide} {
		if own, others := ownFilters(nl, index, s.parent); own != nil || others > 0 {
			return
		}
	}
	_ = nl.QdiscDel(clsact(index))
}

// IsOwnFilter reports whether a filter of clsact is one of this package, by its name.
func IsOwnFilter(name string) bool { return strings.HasPrefix(name, filterName) }

// RemoveFilters removes all filters of this package, which a killed process left, and returns
// how many.
func RemoveFilters(nl *netlink.Handle) (n int, err error) {
	list, err := kernel.Uninterrupted(nl.LinkList)
	if err != nil {
		return 0, fmt.Errorf("interfaces: %w", err)
	}
	for _, l := range list {
		index, had := l.Attrs().Index, n
		for _, s := range []side{ingressSide, egressSide} {
			if own, _ := ownFilters(nl, index, s.parent); own != nil && nl.FilterDel(own) == nil {
				n++
			}
		}
		if n > had {
			removeIfEmpty(nl, index)
		}
	}
	return n, nil
}
