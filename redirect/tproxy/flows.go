package tproxy

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// flow is a connection of a client on this node to an address that is not ours,
// which we accepted. When its destination is no longer served, its packets have
// to be told from those of connections that the node's processes make past us,
// and only their ports tell.
type flow struct {
	client, here netip.AddrPort
}

// findFlows looks for the connections to some destinations both of whose ends
// are in the namespace. A kernel that does not tell its sockets has none.
func findFlows(netNS int, destinations redirect.Set[service.Destination]) (map[flow]struct{}, error) {
	accepted, connected := map[flow]struct{}{}, map[flow]struct{}{}
	if destinations.Len() == 0 {
		return accepted, nil
	}
	nl, err := kernel.Open(netNS, syscall.NETLINK_INET_DIAG)
	if err != nil {
		return nil, err
	}
	defer nl.Close()
	for _, family := range []uint8{syscall.AF_INET, syscall.AF_INET6} {
		sockets, err := nl.SocketDiagTCP(family)
		if errors.Is(err, syscall.ENOENT) || errors.Is(err, syscall.EOPNOTSUPP) {
			continue
		}
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return nil, fmt.Errorf("sockets of this node: %w", err)
		}
		for _, s := range sockets {
			local, remote := endOf(s.ID.Source, s.ID.SourcePort), endOf(s.ID.Destination, s.ID.DestinationPort)
			if destinations.Has(tcpDestination(local)) {
				accepted[flow{client: remote, here: local}] = struct{}{}
			}
			if destinations.Has(tcpDestination(remote)) {
				connected[flow{client: local, here: remote}] = struct{}{}
			}
		}
	}
	for k := range accepted {
		if _, ok := connected[k]; !ok {
			delete(accepted, k)
		}
	}
	return accepted, nil
}

func endOf(ip []byte, port uint16) netip.AddrPort {
	a, _ := netip.AddrFromSlice(ip)
	return netip.AddrPortFrom(a.Unmap(), port)
}

func tcpDestination(a netip.AddrPort) service.Destination {
	return service.Destination{Addr: a.Addr(), Port: a.Port(), Protocol: service.TCP}
}

func (e *elements) flow(k flow) {
	v := service.FamilyOf(k.here.Addr())
	e[linger][v] = append(e[linger][v], nftables.SetElement{Key: k.key()})
}

// key joins client, port, address and port, each padded to four bytes.
func (k flow) key() []byte {
	var key []byte
	for _, end := range []netip.AddrPort{k.client, k.here} {
		key = append(key, end.Addr().AsSlice()...)
		key = append(key, byte(end.Port()>>8), byte(end.Port()), 0, 0)
	}
	return key
}
