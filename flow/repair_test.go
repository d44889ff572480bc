package flow

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/test/foreign"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Programs of others may stand before and behind ours, and an interface that loses ours gets
// them again.
func TestProgramsOfOthersAndDetachedOnes(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	served := func(what string) {
		t.Helper()
		if said, err := lab.Client.Ask("tcp", vip4+":80"); err != nil || !strings.HasPrefix(said, "b1:8080") {
			t.Errorf("%s: %q, %v", what, said, err)
		}
	}
	served("alone")

	list := must.Get(lab.Node.Netlink().LinkList())(t)
	list = slices.DeleteFunc(list, func(l netlink.Link) bool { return l.Attrs().Flags&net.FlagLoopback != 0 })
	for _, place := range []struct {
		name   string
		anchor link.Anchor
	}{{"before", link.Head()}, {"behind", link.Tail()}} {
		p := foreign.Idle(t)
		for _, each := range list {
			for _, side := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				must.OK(t, lab.Node.Do(func() error {
					l, err := link.AttachTCX(link.TCXOptions{Interface: each.Attrs().Index, Program: p, Attach: side, Anchor: place.anchor})
					if err == nil {
						t.Cleanup(func() { _ = l.Close() })
					}
					return err
				}))
			}
		}
		served("another program " + place.name)
	}

	// Somebody detaches them.
	info := must.Get(n.server.kernel.Ethernet.Ingress.Info())(t)
	own, _ := info.ID()
	linksAt := func(index int) (links []link.ID) {
		t.Helper()
		must.OK(t, lab.Node.Do(func() error {
			found, err := link.QueryPrograms(link.QueryOptions{Target: index, Attach: ebpf.AttachTCXIngress})
			if errors.Is(err, syscall.ENOSPC) { // one came since the kernel was asked how many there are
				return nil
			}
			if err != nil {
				return err
			}
			for _, p := range found.Programs {
				if id, ok := p.LinkID(); ok && p.ID == own {
					links = append(links, id)
				}
			}
			return nil
		}))
		return links
	}
	was := make(map[int]link.ID)
	for _, each := range list {
		index := each.Attrs().Index
		links := linksAt(index)
		must.Equalf(t, len(links), 1, "%s: our links %v", each.Attrs().Name, links)
		was[index] = links[0]
		l := must.Get(link.NewFromID(links[0]))(t)
		must.OK(t, errors.Join(l.Detach(), l.Close()))
	}
	wait.For(t, "the programs are there again", patience, func() error {
		for _, each := range list {
			if links := linksAt(each.Attrs().Index); len(links) != 1 || links[0] == was[each.Attrs().Index] {
				return fmt.Errorf("%s: our links %v", each.Attrs().Name, links)
			}
		}
		return nil
	})
	served("attached again")
}
