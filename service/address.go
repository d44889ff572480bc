package service

import (
	"net/netip"
	"slices"

	netutils "k8s.io/utils/net"
)

// parseAddr reads an address as Kubernetes does: leading zeros in IPv4 are
// decimal (A1.7), an IPv4 address mapped into IPv6 is that IPv4 address, and
// zones are not allowed.
func parseAddr(s string) (netip.Addr, bool) {
	a, err := netip.ParseAddr(s)
	if err != nil {
		var ok bool
		if a, ok = netip.AddrFromSlice(netutils.ParseIPSloppy(s)); !ok {
			return netip.Addr{}, false
		}
	}
	if a.Zone() != "" {
		return netip.Addr{}, false
	}
	return a.Unmap(), true
}

// parsePrefix reads a CIDR as Kubernetes does (A1.7). Bits beyond the prefix
// are cleared.
func parsePrefix(s string) (netip.Prefix, bool) {
	p, err := netip.ParsePrefix(s)
	if err != nil {
		_, n, err := netutils.ParseCIDRSloppy(s)
		if err != nil {
			return netip.Prefix{}, false
		}
		a, _ := netip.AddrFromSlice(n.IP)
		ones, _ := n.Mask.Size()
		p = netip.PrefixFrom(a, ones)
	}
	if p.Addr().Is4In6() {
		if p.Bits() < 96 {
			return netip.Prefix{}, false
		}
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked(), true
}

func comparePrefixes(a, b netip.Prefix) int {
	if c := a.Addr().Compare(b.Addr()); c != 0 {
		return c
	}
	return a.Bits() - b.Bits()
}

// addUnique appends what is not there yet. The lists are short.
func addUnique[T comparable](list []T, v T) []T {
	if slices.Contains(list, v) {
		return list
	}
	return append(list, v)
}
