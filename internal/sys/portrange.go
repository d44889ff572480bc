package sys

import (
	"fmt"
	"os"
	"strconv"
	"strings"
)

// LocalPortRange returns the first and last port of the range from which the kernel
// assigns local ports, in the process's network namespace
// (net.ipv4.ip_local_port_range, which also applies to IPv6).
func LocalPortRange() (first, last uint16, err error) {
	const path = "/proc/sys/net/ipv4/ip_local_port_range"
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, 0, err
	}
	if _, err := fmt.Sscan(string(text), &first, &last); err != nil {
		return 0, 0, fmt.Errorf("%s: %w", path, err)
	}
	return first, last, nil
}

// PortSet is a set of ports. A nil set is empty.
type PortSet [1 << 16 / 64]uint64

// Has reports whether the set contains a port.
func (s *PortSet) Has(port uint16) bool { return s != nil && s[port/64]&(1<<(port%64)) != 0 }

// Without returns the ports of a range that are not in the set, or the whole range
// if all are.
func (s *PortSet) Without(first, last uint16) (list []uint16) {
	for port := int(first); port <= int(last); port++ {
		if !s.Has(uint16(port)) {
			list = append(list, uint16(port))
		}
	}
	if list == nil && s != nil {
		return (*PortSet)(nil).Without(first, last)
	}
	return list
}

// ReservedPorts returns the ports that the administrator reserves for servers in
// the process's network namespace (net.ipv4.ip_local_reserved_ports), or nil if
// there are none or they cannot be read.
func ReservedPorts() *PortSet {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_reserved_ports")
	if err != nil {
		return nil
	}
	return parsePorts(strings.TrimSpace(string(text)))
}

// parsePorts parses a list such as "8080,9000-9010". It ignores invalid entries.
func parsePorts(list string) *PortSet {
	if list == "" {
		return nil
	}
	s := new(PortSet)
	for part := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, err := strconv.ParseUint(from, 10, 16)
		if err != nil {
			continue
		}
		last, err := strconv.ParseUint(to, 10, 16)
		if err != nil {
			continue
		}
		for p := first; p <= last; p++ {
			s[p/64] |= 1 << (p % 64)
		}
	}
	return s
}
