package bypass

import (
	"errors"
	"fmt"
	"maps"
	"syscall"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"github.com/vishvananda/netns"
)

// peerXDP is how the other end of a pair of interfaces uses XDP.
type peerXDP int

const (
	otherXDP  peerXDP = iota // redirected packets pass it by (netif_receive_generic_xdp); also if it is unknown
	driverXDP                // packets that are redirected into the interface pass it
	noXDP
)

// peers reads the other ends of pairs (veth, netkit), most of them pods' own interfaces. The
// node asks for them from its own namespace. It is for one goroutine.
type peers struct {
	socket *nl.SocketHandle
	xdp    map[int]peerXDP // by the interface on the node
}

func openPeers(namespace int) (*peers, error) {
	in := netns.None()
	if namespace != 0 {
		in = netns.NsHandle(namespace)
	}
	s, err := nl.GetNetlinkSocketAt(in, netns.None(), syscall.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("netlink socket: %w", err)
	}
	return &peers{&nl.SocketHandle{Socket: s}, make(map[int]peerXDP)}, nil
}

func (p *peers) close() { p.socket.Close() }

// look reads the peers of interfaces that are new or changed. It reports whether the answer of
// passedBy has changed.
func (p *peers) look(list []netlink.Link, changed func(index int) bool) (news bool, err error) {
	before := p.passedBy()
	there := make(map[int]bool, len(list))
	var errs []error
	for _, l := range list {
		a := l.Attrs()
		if !isPair(l) {
			continue
		}
		there[a.Index] = true
		if _, known := p.xdp[a.Index]; known && !changed(a.Index) {
			continue
		}
		xdp, err := p.read(a)
		p.xdp[a.Index] = xdp
		if err != nil && !errors.Is(err, syscall.ENODEV) { // gone, or on its way to a pod
			errs = append(errs, fmt.Errorf("peer of %s: %w", a.Name, err))
		}
	}
	maps.DeleteFunc(p.xdp, func(index int, _ peerXDP) bool { return !there[index] })
	return p.passedBy() != before, errors.Join(errs...)
}

// passedBy reports whether a packet that is redirected may pass by the program of some peer.
func (p *peers) passedBy() bool {
	for _, xdp := range p.xdp {
		if xdp == otherXDP {
			return true
		}
	}
	return false
}

// ways returns the ways into an interface that lead past no program of a peer.
func (p *peers) ways(l netlink.Link) Way {
	a := l.Attrs()
	switch {
	case isPair(l) && a.NetNsID >= 0: // the peer is in another namespace
		switch p.xdp[a.Index] {
		case noXDP:
			if l.Type() == "veth" {
				return Into | Peer
			}
			return Into
		case driverXDP:
			return Into
		default:
			return 0
		}
	case l.Type() != "device" && p.passedBy(): // a bridge, or a VLAN of one: it may lead to the peer
		return 0
	}
	return Into
}

func isPair(l netlink.Link) bool { return l.Type() == "veth" || l.Type() == "netkit" }

// read asks what the peer of an interface has.
func (p *peers) read(of *netlink.LinkAttrs) (peerXDP, error) {
	const (
		targetNetNS  = 46     // IFLA_TARGET_NETNSID
		extensions   = 29     // IFLA_EXT_MASK
		skipCounters = 1 << 3 // RTEXT_FILTER_SKIP_STATS
		driver       = 1      // XDP_ATTACHED_DRV
	)
	request := nl.NewNetlinkRequest(syscall.RTM_GETLINK, 0)
	request.Sockets = map[int]*nl.SocketHandle{syscall.NETLINK_ROUTE: p.socket}
	message := nl.NewIfInfomsg(syscall.AF_UNSPEC)
	message.Index = int32(of.ParentIndex)
	request.AddData(message)
	request.AddData(nl.NewRtAttr(extensions, nl.Uint32Attr(skipCounters)))
	if of.NetNsID >= 0 {
		request.AddData(nl.NewRtAttr(targetNetNS, nl.Uint32Attr(uint32(of.NetNsID))))
	}
	answers, err := request.Execute(syscall.NETLINK_ROUTE, syscall.RTM_NEWLINK)
	if err != nil {
		return otherXDP, err
	}
	if len(answers) != 1 {
		return otherXDP, errors.New("no answer")
	}
	l, err := netlink.LinkDeserialize(nil, answers[0])
	if err != nil {
		return otherXDP, err
	}
	switch xdp := l.Attrs().Xdp; {
	case xdp == nil:
		return otherXDP, errors.New("the kernel does not tell of XDP")
	case !xdp.Attached:
		return noXDP, nil
	case xdp.AttachMode == driver:
		return driverXDP, nil
	}
	return otherXDP, nil
}
