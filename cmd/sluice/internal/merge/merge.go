// Package merge makes one list of the rows that several proxies answer. It does no I/O.
package merge

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/live/api"
)

// List keeps the first rows of an order, at most Limit.
type List[Row any] struct {
	Compare func(a, b *Row) int
	Limit   int
	Rows    []Row
}

// Add adds rows. Equal ones stay in the order in which they came.
func (l *List[Row]) Add(rows []Row) {
	l.Rows = append(l.Rows, rows...)
	slices.SortStableFunc(l.Rows, func(a, b Row) int { return l.Compare(&a, &b) })
	l.Rows = slices.Clone(l.Rows[:min(l.Limit, len(l.Rows))])
}

// Connections returns an order of connections, by the names of live.Orders; nil for
// another name.
func Connections(name string) func(a, b *api.Connection) int {
	field, down := strings.CutPrefix(name, "-")
	order := connections[cmp.Or(field, "time")]
	if order == nil {
		return nil
	}
	return func(a, b *api.Connection) int {
		n := order(a, b)
		if down {
			n = -n
		}
		return cmp.Or(n, a.Time.Compare(b.Time))
	}
}

var connections = map[string]func(a, b *api.Connection) int{
	"id":                  by(func(c *api.Connection) uint64 { return c.ID }),
	"time":                func(a, b *api.Connection) int { return a.Time.Compare(b.Time) },
	"duration":            by(func(c *api.Connection) int64 { return c.DurationUS }),
	"attempts":            by(func(c *api.Connection) int { return c.Attempts }),
	"bytes":               by(func(c *api.Connection) uint64 { return c.BytesFromClient + c.BytesFromEndpoint }),
	"bytes_from_client":   by(func(c *api.Connection) uint64 { return c.BytesFromClient }),
	"bytes_from_endpoint": by(func(c *api.Connection) uint64 { return c.BytesFromEndpoint }),
	"waited":              by(func(c *api.Connection) int64 { return known(c.WaitedUS) }),
	"connect":             by(func(c *api.Connection) int64 { return known(c.ConnectUS) }),
	"first_byte":          by(func(c *api.Connection) int64 { return known(c.FirstByteUS) }),
	"client":              byAddress(func(c *api.Connection) string { return c.Client }),
	"vip":                 byAddress(func(c *api.Connection) string { return c.VIP }),
	"endpoint":            byAddress(func(c *api.Connection) string { return c.Endpoint }),
	"pod":                 by(func(c *api.Connection) string { return c.Pod }),
	"node":                by(func(c *api.Connection) string { return c.Node }),
	"service":             by(func(c *api.Connection) string { return c.Service }),
	"state":               by(func(c *api.Connection) string { return c.State }), // connecting, open
	"idle":                by(func(c *api.Connection) int64 { return known(c.IdleUS) }),
	"rtt":                 by(func(c *api.Connection) int64 { return max(known(c.ClientRTTUS), known(c.EndpointRTTUS)) }),
	"retransmits": by(func(c *api.Connection) uint64 {
		return known(c.ClientRetransmits) + known(c.EndpointRetransmits) + known(c.ClientLost) + known(c.EndpointLost)
	}),
	"unacked": by(func(c *api.Connection) uint64 { return known(c.ClientUnacked) + known(c.EndpointUnacked) }),
}

// Failures sorts failures, the newest first.
func Failures(a, b *api.Failure) int { return b.Time.Compare(a.Time) }

// Rates returns an order of rates, by the names of live.Ratings; nil for another name.
func Rates(name string) func(a, b *api.Rates) int {
	if name == "name" {
		return byName
	}
	rating := ratings[name]
	if rating == nil {
		return nil
	}
	return func(a, b *api.Rates) int { return cmp.Or(cmp.Compare(rating(b), rating(a)), byName(a, b)) }
}

var ratings = map[string]func(*api.Rates) float64{
	"open":     func(r *api.Rates) float64 { return float64(r.Open) },
	"opened":   func(r *api.Rates) float64 { return r.Opened },
	"bytes":    func(r *api.Rates) float64 { return r.BytesFromClient + r.BytesFromEndpoint },
	"failed":   func(r *api.Rates) float64 { return r.Failed + r.FailedAttempts },
	"connect":  func(r *api.Rates) float64 { return float64(r.ConnectP99US) },
	"first":    func(r *api.Rates) float64 { return float64(r.FirstP99US) },
	"duration": func(r *api.Rates) float64 { return float64(r.DurationP99US) },
	"received": func(r *api.Rates) float64 { return r.BytesFromClient },
	"sent":     func(r *api.Rates) float64 { return r.BytesFromEndpoint },
}

func byName(a, b *api.Rates) int {
	return cmp.Or(strings.Compare(a.Service, b.Service), strings.Compare(a.Protocol, b.Protocol), strings.Compare(a.Endpoint, b.Endpoint),
		strings.Compare(a.Client, b.Client), strings.Compare(a.Node, b.Node), strings.Compare(a.ProxyNode, b.ProxyNode))
}

func by[Value cmp.Ordered](get func(*api.Connection) Value) func(a, b *api.Connection) int {
	return func(a, b *api.Connection) int { return cmp.Compare(get(a), get(b)) }
}

func byAddress(get func(*api.Connection) string) func(a, b *api.Connection) int {
	return func(a, b *api.Connection) int {
		x, _ := netip.ParseAddrPort(get(a)) // none is the lowest one
		y, _ := netip.ParseAddrPort(get(b))
		return x.Compare(y)
	}
}

// known returns a number that may not be known: 0 then.
func known[Number int64 | uint64](n *Number) Number {
	if n == nil {
		return 0
	}
	return *n
}
