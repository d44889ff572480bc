package listener

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sockfilter"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/service"
)

// guard is whom a destination answers, where that is not everybody (A3.5,
// A3.6, A3.10): a program on the listening socket drops the first packet of all
// others, so that they see no answer (F5).
type guard struct {
	dst     service.Destination
	name    service.PortName
	allowed []netip.Prefix
}

// nobody is the filter of a socket that answers nobody.
var nobody = sockfilter.Nothing

// protect has a socket answer by the guards and no others. Where the kernel
// takes no program that is long enough, the guards with the most ranges are left
// out: connections to those are accepted, and reset when policy drops them.
func (m *Manager) protect(s *socket, guards []*guard) {
	guards = slices.SortedFunc(slices.Values(guards), func(a, b *guard) int {
		return cmp.Compare(len(a.allowed), len(b.allowed))
	})
	rules := make([]sockfilter.Rule, len(guards))
	for i, g := range guards {
		rules[i] = sockfilter.Rule{Addr: g.dst.Addr, Port: g.dst.Port, Allowed: g.allowed}
	}
	fit := len(guards)
	for ; fit > 0; fit-- {
		program, err := sockfilter.Compile(rules[:fit])
		if err == nil {
			errno := s.filter(program)
			if errno == 0 {
				break
			}
			err = errno
		}
		m.tooMany(guards[fit-1], err)
	}
	if fit == 0 {
		s.unfilter()
	}
	m.leftOpen(s, len(guards)-fit)
}

// leftOpen takes note of how many guards a socket's filter has no room for.
func (m *Manager) leftOpen(s *socket, n int) {
	m.stats.unguarded.Add(int64(n - s.unguarded))
	s.unguarded = n
}

// tooMany says what becomes of a guard that is left out.
func (m *Manager) tooMany(g *guard, err error) {
	why := err.Error()
	if errors.Is(err, sockfilter.ErrTooLong) {
		why = fmt.Sprintf("more than fit into a program of %d instructions", sys.MaxFilterOps)
	}
	m.once("Service "+g.name.Name.String(), fmt.Errorf(
		"the kernel does not take the %d source ranges of %s (%s): who is not in them is reset, not met with silence; fewer and wider ranges help",
		len(g.allowed), netip.AddrPortFrom(g.dst.Addr, g.dst.Port), why))
}
