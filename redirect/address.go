package redirect

import "net/netip"

// CheckAddr tells why destinations of a plan cannot be on an address, or nil.
func CheckAddr(a netip.Addr) error { return validAddr(a) }

// CheckRange tells why this node cannot deliver a range to itself, or nil.
func CheckRange(p netip.Prefix) error { return validPrefix(p) }
