package redirect

import "net/netip"

// CheckAddr tells why destinations of a plan cannot be on an address, or nil.
func CheckAddr(a netip.Addr) error { return validAddr(a) }
