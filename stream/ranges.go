package stream

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sockfilter"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
)

// dropAll is the filter of a socket that answers nobody.
var dropAll = sockfilter.Nothing

// admit has a listening socket answer the clients that the Openings allow, and
// drop the first packet of all others (A3.5, A3.6, A3.10, F5). Where the kernel
// takes no program that is long enough, the Openings with the most ranges are left
// out: connections to those are accepted, and reset when policy drops them.
func (s *Server) admit(sock *socket, limited []*policy.Opening) {
	limited = slices.SortedFunc(slices.Values(limited), func(a, b *policy.Opening) int {
		return cmp.Compare(len(a.Allowed), len(b.Allowed))
	})
	rules := make([]sockfilter.Rule, len(limited))
	for i, o := range limited {
		rules[i] = sockfilter.Rule{Addr: o.Addr, Port: o.Port, Allowed: o.Allowed}
	}
	fit := len(limited)
	for ; fit > 0; fit-- {
		program, err := sockfilter.Compile(rules[:fit])
		if err == nil {
			errno := sock.filter(program)
			if errno == 0 {
				break
			}
			err = errno
		}
		s.warnTooManyRanges(limited[fit-1], err)
	}
	if fit == 0 {
		sock.unfilter()
	}
	s.setUnfiltered(sock, len(limited)-fit)
}

// setUnfiltered notes how many Openings a socket's filter has no room for.
func (s *Server) setUnfiltered(sock *socket, n int) {
	s.stats.unguarded.Add(int64(n - sock.unfiltered))
	sock.unfiltered = n
}

// warnTooManyRanges says what happens to an Opening that is left out.
func (s *Server) warnTooManyRanges(o *policy.Opening, err error) {
	why := err.Error()
	if errors.Is(err, sockfilter.ErrTooLong) {
		why = fmt.Sprintf("more than fit into a program of %d instructions", sys.MaxFilterOps)
	}
	s.once.Warn("Service "+o.Name.Name.String(), fmt.Errorf(
		"the kernel does not take the %d source ranges of %s (%s): who is not in them is reset, not met with silence; fewer and wider ranges help",
		len(o.Allowed), netip.AddrPortFrom(o.Addr, o.Port), why))
}
