package sklookup

import (
	"errors"
	"fmt"
	"net"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// ingress is a program at the ingress of every interface but lo (tcx, Linux 6.6).
// It marks the packets for sockets of this node that are bound to a client's
// address, so that a policy routing rule can bring them back (F7). What a socket
// of this node does not expect is not marked: other nodes' answers, and clients'
// own connections, pass. The program is held by descriptors, one for each
// interface, and ends with the process.
type ingress struct {
	namespace int // descriptor; 0 is the process's own
	program   *ebpf.Program
	nl        *netlink.Handle
	links     map[int]link.Link // by the number of the interface
}

// openIngress loads the program and tries it on lo. An error says that the kernel
// or the process cannot do that.
func openIngress(namespace int, mark uint32, ports [2]uint16) (*ingress, error) {
	i := &ingress{namespace: namespace, links: map[int]link.Link{}}
	var err error
	if i.program, err = loadIngress(mark, ports); err != nil {
		return nil, fmt.Errorf("load the ingress program: %w", err)
	}
	if i.nl, err = kernel.Open(namespace, syscall.NETLINK_ROUTE); err == nil {
		var trial link.Link
		if trial, err = i.attach(kernel.Loopback); err == nil {
			err = trial.Close()
		}
	}
	if err != nil {
		i.close()
		return nil, err
	}
	return i, nil
}

func (i *ingress) attach(index int) (l link.Link, err error) {
	err = sys.InNetNS(i.namespace, func() (err error) {
		// It comes first, as another program may end the look at a packet, and
		// has those after it run.
		l, err = link.AttachTCX(link.TCXOptions{Interface: index, Program: i.program, Attach: ebpf.AttachTCXIngress, Anchor: link.Head()})
		return err
	})
	return l, err
}

// follow attaches the program to the interfaces that are new, or that somebody
// took it from, which is a repair, and lets go of those that are gone.
func (i *ingress) follow() (repaired bool, err error) {
	list, err := i.nl.LinkList()
	if err != nil {
		return false, fmt.Errorf("interfaces: %w", err)
	}
	there := make(map[int]bool, len(list))
	var errs []error
	for _, k := range list {
		a := k.Attrs()
		had := i.links[a.Index] != nil
		there[a.Index] = true
		if a.Flags&net.FlagLoopback != 0 || i.attachedTo(a.Index) {
			continue
		}
		l, err := i.attach(a.Index)
		switch {
		case errors.Is(err, syscall.ENODEV): // gone meanwhile
			continue
		case err != nil:
			errs = append(errs, fmt.Errorf("attach the ingress program to %s: %w", a.Name, err))
			continue
		}
		i.links[a.Index], repaired = l, repaired || had
	}
	for index, l := range i.links {
		if !there[index] {
			_ = l.Close()
			delete(i.links, index)
		}
	}
	return repaired, errors.Join(errs...)
}

// attachedTo reports whether the program is at an interface. A link that was cut,
// or whose interface is gone, says that it is at none.
func (i *ingress) attachedTo(index int) bool {
	l := i.links[index]
	if l == nil {
		return false
	}
	info, err := l.Info()
	if err == nil {
		if tcx := info.TCX(); tcx != nil && int(tcx.Ifindex) == index {
			return true
		}
	}
	_ = l.Close()
	delete(i.links, index)
	return false
}

// detach takes the program from all interfaces.
func (i *ingress) detach() {
	for index, l := range i.links {
		_ = l.Close()
		delete(i.links, index)
	}
}

func (i *ingress) close() {
	i.detach()
	_ = i.program.Close()
	if i.nl != nil {
		i.nl.Close()
	}
}
