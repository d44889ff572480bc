package world

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// AnyIP delivers the whole service CIDR to the node itself, so that a relay can
// bind the service's address or be steered to (fact F2). IPv6 also needs
// ip_nonlocal_bind.
func (w *World) AnyIP() error {
	h, err := netlink.NewHandleAt(w.Node.handle, unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("netlink: %w", err)
	}
	defer h.Close()
	lo, err := h.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("link lo: %w", err)
	}
	route := &netlink.Route{
		LinkIndex: lo.Attrs().Index,
		Dst:       ipNet(w.ServiceCIDR),
		Table:     unix.RT_TABLE_LOCAL,
		Type:      unix.RTN_LOCAL,
		Scope:     netlink.SCOPE_HOST,
	}
	if err := h.RouteAdd(route); err != nil {
		return fmt.Errorf("route local %s: %w", w.ServiceCIDR, err)
	}
	if w.IPv6 {
		return w.Node.Do(func() error { return sysctl("ipv6/ip_nonlocal_bind", "1") })
	}
	return nil
}

// Loopback is the address that TPROXY steers to.
func (w *World) Loopback() netip.Addr {
	if w.IPv6 {
		return netip.IPv6Loopback()
	}
	return netip.AddrFrom4([4]byte{127, 0, 0, 1})
}

// TPROXY steers every port of the service's address to the same port of Loopback,
// where a transparent socket must listen. It uses one rule and no conntrack.
func (w *World) TPROXY() error {
	c, table, err := w.nft("tproxy")
	if err != nil {
		return err
	}
	chain := c.AddChain(&nftables.Chain{
		Name: "prerouting", Table: table, Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityMangle,
	})
	family := byte(table.Family)
	c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(w.matchVIP(unix.IPPROTO_TCP),
		&expr.Immediate{Register: unix.NFT_REG_1, Data: w.Loopback().AsSlice()},
		&expr.Payload{DestRegister: unix.NFT_REG_2, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.TProxy{Family: family, TableFamily: family, RegAddr: unix.NFT_REG_1, RegPort: unix.NFT_REG_2},
		&expr.Verdict{Kind: expr.VerdictAccept},
	)})
	if err := c.Flush(); err != nil {
		return fmt.Errorf("nftables tproxy: %w", err)
	}
	return nil
}

// DNAT translates the service's address to the endpoints in the kernel, in turn.
// It is leaner than kube-proxy's rules: no chains for each service and endpoint,
// no masquerading, no checks of connection state.
func (w *World) DNAT() error {
	c, table, err := w.nft("dnat")
	if err != nil {
		return err
	}
	chain := c.AddChain(&nftables.Chain{
		Name: "prerouting", Table: table, Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest,
	})
	var exprs []expr.Any
	if len(w.Endpoints) == 1 {
		exprs = append(exprs, &expr.Immediate{Register: unix.NFT_REG_1, Data: w.Endpoints[0].AsSlice()})
	} else {
		pick, err := w.endpointMap(c, table)
		if err != nil {
			return err
		}
		exprs = append(exprs, pick...)
	}
	for _, protocol := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP} {
		rule := append(w.matchVIP(protocol), exprs...)
		c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: append(rule,
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(table.Family), RegAddrMin: unix.NFT_REG_1},
		)})
	}
	if err := c.Flush(); err != nil {
		return fmt.Errorf("nftables dnat: %w", err)
	}
	return nil
}

// endpointMap creates a map from 0, 1, … to the endpoints, and the expressions
// that look up the next one.
func (w *World) endpointMap(c *nftables.Conn, table *nftables.Table) ([]expr.Any, error) {
	set := &nftables.Set{
		Table: table, Name: "endpoints", IsMap: true,
		KeyType: nftables.TypeInteger, DataType: nftables.TypeIPAddr,
	}
	if w.IPv6 {
		set.DataType = nftables.TypeIP6Addr
	}
	var elements []nftables.SetElement
	for i, ep := range w.Endpoints {
		elements = append(elements, nftables.SetElement{
			Key: binary.NativeEndian.AppendUint32(nil, uint32(i)), Val: ep.AsSlice(),
		})
	}
	if err := c.AddSet(set, elements); err != nil {
		return nil, fmt.Errorf("nftables endpoint map: %w", err)
	}
	return []expr.Any{
		&expr.Numgen{Register: unix.NFT_REG_1, Modulus: uint32(len(w.Endpoints)), Type: unix.NFT_NG_INCREMENTAL},
		&expr.Lookup{
			SourceRegister: unix.NFT_REG_1, DestRegister: unix.NFT_REG_1, IsDestRegSet: true,
			SetName: set.Name, SetID: set.ID,
		},
	}, nil
}

func (w *World) nft(name string) (*nftables.Conn, *nftables.Table, error) {
	c, err := nftables.New(nftables.WithNetNSFd(w.Node.FD()))
	if err != nil {
		return nil, nil, fmt.Errorf("nftables: %w", err)
	}
	table := &nftables.Table{Name: name, Family: nftables.TableFamilyIPv4}
	if w.IPv6 {
		table.Family = nftables.TableFamilyIPv6
	}
	return c, c.AddTable(table), nil
}

// matchVIP matches a protocol's packets to the service's address.
func (w *World) matchVIP(protocol byte) []expr.Any {
	daddr := &expr.Payload{DestRegister: unix.NFT_REG_1, Base: expr.PayloadBaseNetworkHeader, Offset: 16, Len: 4}
	if w.IPv6 {
		daddr.Offset, daddr.Len = 24, 16
	}
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: unix.NFT_REG_1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: []byte{protocol}},
		daddr,
		&expr.Cmp{Op: expr.CmpOpEq, Register: unix.NFT_REG_1, Data: w.VIP.AsSlice()},
	}
}
