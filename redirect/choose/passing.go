package choose

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"github.com/vishvananda/netlink/nl"

	"github.com/sluice-proxy/sluice/redirect"
)

// passes asks the kernel for routes, and returns why this node would not let the
// answers of an endpoint here to a client of another node pass. A mode that takes all packets to its ports does not: each node then takes the answers
// to all others.
func passes(stranger netip.Addr, endpoint netip.AddrPort, r redirect.Replies) error {
	for _, port := range []uint16{r.FirstPort, r.FirstPort + (r.LastPort-r.FirstPort)/2, r.LastPort} {
		// A kernel that cannot be asked is believed.
		if taken, err := isTaken(endpoint, netip.AddrPortFrom(stranger, port)); err == nil && taken {
			return &RepliesError{fmt.Errorf("this node would take an endpoint's answer to %s, port %d, which is a client of another node", stranger, port)}
		}
	}
	return nil
}

// Attributes of a request for a route (linux/rtnetlink.h).
const (
	attrProtocol        = 27 // RTA_IP_PROTO
	attrSourcePort      = 28 // RTA_SPORT
	attrDestinationPort = 29 // RTA_DPORT
)

// isTaken reports whether a TCP packet that comes in by the cable is delivered
// locally.
func isTaken(from, to netip.AddrPort) (bool, error) {
	in, err := net.InterfaceByName(cable)
	if err != nil {
		return false, err
	}
	req := nl.NewNetlinkRequest(syscall.RTM_GETROUTE, 0)
	msg := &nl.RtMsg{}
	msg.Family, msg.Dst_len, msg.Src_len = syscall.AF_INET, uint8(to.Addr().BitLen()), uint8(from.Addr().BitLen())
	if to.Addr().Is6() {
		msg.Family = syscall.AF_INET6
	}
	req.AddData(msg)
	for _, a := range []struct {
		kind  int
		value []byte
	}{
		{syscall.RTA_DST, to.Addr().AsSlice()},
		{syscall.RTA_SRC, from.Addr().AsSlice()},
		{syscall.RTA_IIF, binary.NativeEndian.AppendUint32(nil, uint32(in.Index))},
		{attrProtocol, []byte{syscall.IPPROTO_TCP}},
		{attrSourcePort, binary.BigEndian.AppendUint16(nil, from.Port())},
		{attrDestinationPort, binary.BigEndian.AppendUint16(nil, to.Port())},
	} {
		req.AddData(nl.NewRtAttr(a.kind, a.value))
	}
	answers, err := req.Execute(syscall.NETLINK_ROUTE, syscall.RTM_NEWROUTE)
	switch {
	case errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.ENETUNREACH):
		return false, nil // it forwards nothing
	case err != nil:
		return false, err
	case len(answers) == 0:
		return false, errors.New("no answer")
	}
	return nl.DeserializeRtMsg(answers[0]).Type == syscall.RTN_LOCAL, nil
}
