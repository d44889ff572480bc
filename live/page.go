package live

import (
	"cmp"
	"container/heap"
	"context"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/filter"
	"github.com/sluice-proxy/sluice/service"
)

// Order is an order of records.
type Order struct {
	compare func(a, b *conntrack.Record) int
	// transport is set if it looks at what transports say.
	transport bool
}

// orders by their names.
var orders = map[string]func(a, b *conntrack.Record) int{
	"id":                  byNumber(func(r *conntrack.Record) int64 { return int64(r.ID) }),
	"time":                byNumber(func(r *conntrack.Record) int64 { return r.Start }),
	"duration":            byNumber(func(r *conntrack.Record) int64 { return r.Duration }),
	"attempts":            byNumber(func(r *conntrack.Record) int64 { return int64(r.Attempts) }),
	"bytes":               byNumber(func(r *conntrack.Record) int64 { return int64(r.BytesFromClient + r.BytesFromEndpoint) }),
	"bytes_from_client":   byNumber(func(r *conntrack.Record) int64 { return int64(r.BytesFromClient) }),
	"bytes_from_endpoint": byNumber(func(r *conntrack.Record) int64 { return int64(r.BytesFromEndpoint) }),
	"waited":              byNumber((*conntrack.Record).WaitTime),
	"connect":             byNumber(func(r *conntrack.Record) int64 { return r.ConnectTime }),
	"first_byte":          byNumber(func(r *conntrack.Record) int64 { return r.FirstByte }),
	"client":              func(a, b *conntrack.Record) int { return a.Client.Compare(b.Client) },
	"vip":                 func(a, b *conntrack.Record) int { return a.VIP.Compare(b.VIP) },
	"endpoint":            func(a, b *conntrack.Record) int { return endpointOf(a).Addr.Compare(endpointOf(b).Addr) },
	"pod":                 func(a, b *conntrack.Record) int { return endpointOf(a).Pod.Compare(endpointOf(b).Pod) },
	"node":                func(a, b *conntrack.Record) int { return cmp.Compare(endpointOf(a).Node(), endpointOf(b).Node()) },
	"service":             compareServices,
	"state":               byNumber(func(r *conntrack.Record) int64 { return int64(r.State()) }),
}

// transportOrders are those by what transports say.
var transportOrders = map[string]func(a, b *conntrack.Record) int{
	"idle":        byTransport(func(t *conntrack.Transport) int64 { return t.Idle }),
	"rtt":         byTransport(func(t *conntrack.Transport) int64 { n, _ := t.RTT(); return n }),
	"retransmits": byTransport(func(t *conntrack.Transport) int64 { n, _ := t.Retransmits(); return n }),
	"unacked":     byTransport(func(t *conntrack.Transport) int64 { n, _ := t.Unacked(); return n }),
}

func byNumber(get func(*conntrack.Record) int64) func(a, b *conntrack.Record) int {
	return func(a, b *conntrack.Record) int { return cmp.Compare(get(a), get(b)) }
}

// byTransport is byNumber of what transports say; 0 where nothing is known.
func byTransport(get func(*conntrack.Transport) int64) func(a, b *conntrack.Record) int {
	return byNumber(func(r *conntrack.Record) int64 {
		t := r.Transport()
		if t == nil {
			return 0
		}
		return get(t)
	})
}

// noEndpoint stands for the endpoint of a connection without an attempt.
var noEndpoint = service.Endpoint{Addr: netip.AddrPort{}}

func endpointOf(r *conntrack.Record) *service.Endpoint {
	if r.Endpoint == nil {
		return &noEndpoint
	}
	return r.Endpoint
}

func compareServices(a, b *conntrack.Record) int {
	switch {
	case a.Port == b.Port:
		return 0
	case a.Port == nil:
		return -1
	case b.Port == nil:
		return 1
	}
	return a.Port.Name.Compare(b.Port.Name)
}

// Orders returns the names of all orders, sorted.
func Orders() []string {
	return slices.Sorted(func(yield func(string) bool) {
		maps.Keys(orders)(yield)
		maps.Keys(transportOrders)(yield)
	})
}

// ParseOrder returns an order by its name. A minus before it reverses it. The empty
// name is the order of opening. Equal records are in the order of opening.
func ParseOrder(name string) (Order, error) {
	field, down := strings.CutPrefix(name, "-")
	order, ok := orders[cmp.Or(field, "time")]
	transport := false
	if !ok {
		order, transport = transportOrders[field]
	}
	if !ok && !transport {
		return Order{}, fmt.Errorf("sort %q: not one of %s", name, strings.Join(Orders(), ", "))
	}
	return Order{func(a, b *conntrack.Record) int {
		n := order(a, b)
		if down {
			n = -n
		}
		return cmp.Or(n, cmp.Compare(a.ID, b.ID))
	}, transport}, nil
}

// Page is a part of the open connections.
type Page struct {
	Open    int // connections that were looked at
	Matched int
	Records []conntrack.Record
}

// Wanted is what a Page shows: those that match, from Offset on, at most Limit, with
// Record.Transport if Transport, the filter or the order asks for it.
type Wanted struct {
	Filter        *filter.Filter
	Order         Order
	Offset, Limit int
	Transport     bool
}

// Page returns open connections in an order. It keeps no more than Offset and Limit
// together.
func (v *View) Page(ctx context.Context, w Wanted) (*Page, error) {
	p, list := &Page{}, v.List
	if w.Transport || w.Order.transport || w.Filter.NeedsTransport() {
		list = v.Inspect
	}
	top := &topHeap{order: w.Order}
	if err := v.begin(ctx); err != nil {
		return nil, err
	}
	defer v.end()
	err := list(ctx, func(r *conntrack.Record) error {
		p.Open++
		if !w.Filter.Match(r) {
			return nil
		}
		p.Matched++
		top.offer(r, w.Offset+w.Limit)
		return nil
	})
	if err != nil {
		return nil, err
	}
	slices.SortFunc(top.records, func(a, b conntrack.Record) int { return w.Order.compare(&a, &b) })
	p.Records = top.records[min(w.Offset, len(top.records)):]
	return p, nil
}

// topHeap keeps the first records of an order. The last of them is on top.
type topHeap struct {
	order   Order
	records []conntrack.Record
}

// offer keeps a copy of a record if it is among the first n.
func (h *topHeap) offer(r *conntrack.Record, n int) {
	full := len(h.records) >= n
	if n == 0 || full && h.order.compare(r, &h.records[0]) >= 0 {
		return
	}
	kept := *r
	kept.Failed = slices.Clone(r.Failed)
	if t := r.Transport(); t != nil {
		t := *t
		kept.SetTransport(&t)
	}
	if full {
		h.records[0] = kept
		heap.Fix(h, 0)
		return
	}
	heap.Push(h, kept)
}

// Len implements heap.Interface.
func (h *topHeap) Len() int { return len(h.records) }

// Less implements heap.Interface.
func (h *topHeap) Less(i, j int) bool { return h.order.compare(&h.records[i], &h.records[j]) > 0 }

// Swap implements heap.Interface.
func (h *topHeap) Swap(i, j int) { h.records[i], h.records[j] = h.records[j], h.records[i] }

// Push implements heap.Interface.
func (h *topHeap) Push(x any) {
	if r, ok := x.(conntrack.Record); ok {
		h.records = append(h.records, r)
	}
}

// Pop implements heap.Interface. Records are never taken one by one.
func (h *topHeap) Pop() any { return nil }
