package service

import (
	"fmt"
	"net/netip"
	"slices"

	netutils "k8s.io/utils/net"
)

// parseAddr parses an address as Kubernetes does (A1.7): leading zeros in IPv4 are
// decimal, an IPv4-mapped IPv6 address becomes IPv4, and zones are invalid.
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

// ParseAddr parses an address as Kubernetes does (A1.7).
func ParseAddr(s string) (netip.Addr, bool) { return parseAddr(s) }

// parsePrefix parses a CIDR as Kubernetes does (A1.7). It clears the bits beyond
// the prefix.
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

// addUnique appends v unless the list contains it. The lists are short.
func addUnique[T comparable](list []T, v T) []T {
	if slices.Contains(list, v) {
		return list
	}
	return append(list, v)
}

// specialRanges are the addresses that neither a Service nor an endpoint can have.
// 240.0.0.0/4 is not one of them: Linux routes it like any other.
var specialRanges = []struct {
	prefix netip.Prefix
	what   string
}{
	{netip.MustParsePrefix("0.0.0.0/8"), "an address of 0.0.0.0/8, which no host has"},
	{netip.MustParsePrefix("127.0.0.0/8"), "a loopback address"},
	{netip.MustParsePrefix("169.254.0.0/16"), "a link-local address"},
	{netip.MustParsePrefix("224.0.0.0/4"), "a multicast address"},
	{netip.MustParsePrefix("255.255.255.255/32"), "the broadcast address"},
	{netip.MustParsePrefix("::/96"), "an address of ::/96, which no other host has"},
	{netip.MustParsePrefix("::ffff:0:0/96"), "an IPv4 address mapped into IPv6"},
	{netip.MustParsePrefix("fe80::/10"), "a link-local address"},
	{netip.MustParsePrefix("ff00::/8"), "a multicast address"},
}

// CheckAddress returns an error if neither a Service nor an endpoint can have the
// address. It does not know the broadcast addresses of links; a Store learns those
// from its [Host].
func CheckAddress(a netip.Addr) error { return CheckRange(netip.PrefixFrom(a, a.BitLen())) }

// CheckRange is CheckAddress for a range of addresses.
func CheckRange(p netip.Prefix) error {
	if p.Bits() == 0 {
		return fmt.Errorf("it holds every address")
	}
	for _, special := range specialRanges {
		switch {
		case !special.prefix.Overlaps(p):
		case p.IsSingleIP():
			return fmt.Errorf("it is %s", special.what)
		default:
			return fmt.Errorf("it overlaps %s", special.prefix)
		}
	}
	return nil
}
