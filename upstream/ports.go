package upstream

import "github.com/sluice-proxy/sluice/internal/sys"

// Range is a range of local ports, first to last.
type Range struct{ First, Last uint16 }

// has reports whether a port is in the range.
func (r Range) has(port uint16) bool { return port >= r.First && port <= r.Last }

func (r Range) overlaps(o Range) bool { return o.First <= r.Last && r.First <= o.Last }

func (r Range) upperEighth() Range {
	return Range{First: r.Last - (r.Last-r.First)/8, Last: r.Last}
}

// kernelPorts returns the range that the kernel assigns ports from by itself.
func kernelPorts() Range {
	first, last, err := sys.LocalPortRange()
	if err != nil {
		first, last = 32768, 60999
	}
	return Range{First: first, Last: last}
}

// spare returns the range that is used when the kernel's range is exhausted: the
// ports above it, so that other programs lose none of the kernel's ports; if there
// are too few, the upper eighth of the kernel's range.
func (r Range) spare() Range {
	const enough = 2048
	if r.Last <= 65534-enough {
		return Range{First: r.Last + 1, Last: 65534}
	}
	return r.upperEighth()
}
