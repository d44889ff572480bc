package bypass

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/flow/bypass/bpf"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// netfilterPrograms finds BPF programs at netfilter's hooks (Linux 6.4), which are in no chain. Each
// has a BPF link. Opening links takes CAP_SYS_ADMIN, and a link's info lacks its network namespace.
// So a BPF iterator reads all links in one system call, with no more rights than our other programs
// need.
type netfilterPrograms struct {
	namespace uint32 // its number
	iterator  *link.Iter
}

// linkReader is the iterator over links. A process opens it once and keeps it: loading its program
// reads the types of the whole kernel.
var linkReader struct {
	sync.Mutex
	iterator *link.Iter // guarded by Mutex
}

// openNetfilterPrograms returns nil if the kernel has no such programs.
func openNetfilterPrograms(namespace int) (*netfilterPrograms, error) {
	err := features.HaveProgramType(ebpf.Netfilter)
	if errors.Is(err, ebpf.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("BPF programs of netfilter: %w", err)
	}
	number, err := sys.NetNSInode(namespace)
	if err != nil {
		return nil, err
	}
	n := &netfilterPrograms{namespace: uint32(number)}
	linkReader.Lock()
	defer linkReader.Unlock()
	if linkReader.iterator == nil {
		if linkReader.iterator, err = openLinkReader(); err != nil {
			return nil, fmt.Errorf("BPF programs of netfilter cannot be found: %w", err)
		}
	}
	n.iterator = linkReader.iterator
	return n, nil
}

// hooks returns the hooks of IP that have programs in the network namespace.
func (n *netfilterPrograms) hooks() (hooks []uint32, err error) {
	links, err := n.links()
	if err != nil {
		return nil, fmt.Errorf("BPF programs of netfilter: %w", err)
	}
	for _, l := range links {
		ip := l.Family == syscall.AF_INET || l.Family == syscall.AF_INET6
		if l.NamespaceNumber == n.namespace && l.Dead == 0 && ip {
			hooks = append(hooks, l.Hook)
		}
	}
	return hooks, nil
}

// links returns those of all network namespaces.
func (n *netfilterPrograms) links() ([]bpf.LinksNetfilterLink, error) {
	r, err := n.iterator.Open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	links := make([]bpf.LinksNetfilterLink, len(b)/binary.Size(bpf.LinksNetfilterLink{}))
	_, err = binary.Decode(b, binary.NativeEndian, links)
	return links, err
}

// openLinkReader loads the program that writes a bpf.LinksNetfilterLink for each link of that kind.
func openLinkReader() (*link.Iter, error) {
	spec, err := bpf.LoadLinks()
	if err != nil {
		return nil, err
	}
	spec.Programs[bpf.LinksProgReadLinks].Name = "sluice_links"
	program, err := ebpf.NewProgram(spec.Programs[bpf.LinksProgReadLinks])
	if err != nil {
		return nil, err
	}
	defer program.Close() // the iterator has it
	return link.AttachIter(link.IterOptions{Program: program})
}
