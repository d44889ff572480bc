package live

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/filter"
	"github.com/sluice-proxy/sluice/service"
)

// Dimension is a part of the key by which a Meter groups connections.
type Dimension uint8

// The dimensions, as a set.
const (
	ByService Dimension = 1 << iota
	ByEndpoint
	ByClient
	ByNode
)

var dimensions = map[string]Dimension{"service": ByService, "endpoint": ByEndpoint, "client": ByClient, "node": ByNode}

// ParseDimensions returns the set of some names, separated by commas.
func ParseDimensions(names string) (Dimension, error) {
	var set Dimension
	for name := range strings.SplitSeq(names, ",") {
		d, ok := dimensions[name]
		if !ok {
			return 0, fmt.Errorf("by %q: not one of %s", name, strings.Join(slices.Sorted(maps.Keys(dimensions)), ", "))
		}
		set |= d
	}
	return set, nil
}

// Names returns the names of the dimensions of a set, sorted.
func (d Dimension) Names() []string {
	var names []string
	for _, name := range slices.Sorted(maps.Keys(dimensions)) {
		if d&dimensions[name] != 0 {
			names = append(names, name)
		}
	}
	return names
}

const (
	// maxGroups bounds the groups of a Meter. Further connections are in one group
	// without a key.
	maxGroups = 10000
	// quietFrames is how many frames a group stays without a connection.
	quietFrames = 30
)

// MeterOptions say what a Meter measures.
type MeterOptions struct {
	Filter *filter.Filter
	By     Dimension
	// Interval is the least time between two frames.
	Interval time.Duration
	// WholeTimes measures from the acceptance also by endpoint, so that the groups of a
	// Service together say what its clients waited.
	WholeTimes bool
}

// Meter measures rates of the connections that match a filter, in groups. One
// goroutine reads its frames.
type Meter struct {
	options MeterOptions
	view    *View
	wake    chan struct{}

	mu     sync.Mutex
	groups map[Key]*Group
	total  Group
	other  Group // beyond maxGroups
	lost   uint64
	began  time.Time // of the interval
	frame  *Frame    // the one that was not read yet
}

// Key identifies a group. The parts that its Meter does not group by are zero.
type Key struct {
	Service  service.PortName
	Endpoint netip.AddrPort
	Client   netip.Addr
	Node     string
}

// Group are the counts of one group in an interval.
type Group struct {
	Key      Key
	Endpoint *service.Endpoint // the last one seen, if the group is by endpoint
	// Open and Connecting are the connections at the last look.
	Open, Connecting  int
	Opened, Ended     uint64
	Failed            uint64 // reached no endpoint, or an endpoint broke them
	Broken            uint64 // those among them that had reached an endpoint
	FailedAttempts    uint64
	SavedAttempts     uint64 // those among them after which another endpoint served the client
	BytesFromClient   uint64
	BytesFromEndpoint uint64
	// Answered are connections whose first byte from the endpoint came, and Unanswered those
	// that ended without one although the client had sent something. Waiting are open ones
	// like those at the last look. Unserved is the longest that one of them waited.
	Answered, Unanswered uint64
	Waiting              int
	Unserved             time.Duration
	// Connect and FirstByte are from the acceptance, or if the group is by endpoint, from the
	// attempt at this endpoint.
	Connect, FirstByte Durations
	// Lasted are the times from the acceptance to the end, of connections that ended.
	Lasted Durations

	quiet uint8
	rank  float64 // of Sort
}

// Frame is what happened in an interval.
type Frame struct {
	Time   time.Time
	Length time.Duration
	Total  Group
	Groups []*Group // in no order
	Lost   uint64
}

// busy reports whether a connection is open or something happened.
func (g *Group) busy() bool { return g.Open > 0 || g.Opened+g.Ended+g.FailedAttempts > 0 }

// DropQuiet removes the groups of which nothing is open and nothing happened.
func (f *Frame) DropQuiet() {
	f.Groups = slices.DeleteFunc(f.Groups, func(g *Group) bool { return !g.busy() })
}

// add adds the counts of another group.
func (g *Group) add(o *Group) {
	g.Open += o.Open
	g.Connecting += o.Connecting
	g.Opened += o.Opened
	g.Ended += o.Ended
	g.Failed += o.Failed
	g.Broken += o.Broken
	g.FailedAttempts += o.FailedAttempts
	g.SavedAttempts += o.SavedAttempts
	g.BytesFromClient += o.BytesFromClient
	g.BytesFromEndpoint += o.BytesFromEndpoint
	g.Answered += o.Answered
	g.Unanswered += o.Unanswered
	g.Waiting += o.Waiting
	g.Unserved = max(g.Unserved, o.Unserved)
	g.Connect.merge(&o.Connect)
	g.FirstByte.merge(&o.FirstByte)
	g.Lasted.merge(&o.Lasted)
}

// isFailure reports whether an end is one that an endpoint, or the lack of one, has
// caused.
func isFailure(e conntrack.End) bool {
	switch e {
	case conntrack.ConnectFailed, conntrack.NoEndpoints, conntrack.LimitReached, conntrack.NamespaceLimit, conntrack.NotForwarded:
		return true
	}
	return e.ByEndpoint()
}

// key returns the key of a connection and of an endpoint that it tried.
func (m *Meter) key(r *conntrack.Record, ep *service.Endpoint) Key {
	var k Key
	if m.options.By&ByService != 0 && r.Port != nil {
		k.Service = r.Port.Name
	}
	if m.options.By&ByClient != 0 {
		k.Client = r.Client.Addr()
	}
	if ep != nil {
		if m.options.By&ByEndpoint != 0 {
			k.Endpoint = ep.Addr
		}
		if m.options.By&ByNode != 0 {
			k.Node = ep.Node()
		}
	}
	return k
}

// group returns the group of a key. m.mu is held.
func (m *Meter) group(r *conntrack.Record, ep *service.Endpoint) *Group {
	k := m.key(r, ep)
	g := m.groups[k]
	if g == nil {
		if len(m.groups) >= maxGroups {
			return &m.other
		}
		g = &Group{Key: k}
		m.groups[k] = g
	}
	if m.options.By&ByEndpoint != 0 && ep != nil {
		g.Endpoint = ep
	}
	return g
}

// beginLook forgets which connections were open.
func (m *Meter) beginLook() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.total.forgetOpen()
	m.other.forgetOpen()
	for _, g := range m.groups {
		g.forgetOpen()
	}
}

func (g *Group) forgetOpen() { g.Open, g.Connecting, g.Waiting = 0, 0, 0 }

// sample adds a record: of an open connection, one that opened or one that ended.
// The bytes are those since the last sample of the connection.
func (m *Meter) sample(r *conntrack.Record, fromClient, fromEndpoint uint64) {
	if r.Event == conntrack.Refused || !m.options.Filter.Match(r) {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	own := m.group(r, r.Endpoint)
	// A connection has its first byte in the sample that has its first bytes.
	first := r.FirstByte > 0 && fromEndpoint > 0 && fromEndpoint == r.BytesFromEndpoint
	unanswered := r.BytesFromClient > 0 && r.BytesFromEndpoint == 0
	for _, g := range []*Group{own, &m.total} {
		var before int64 // the attempt at this endpoint
		if g == own && m.options.By&ByEndpoint != 0 && !m.options.WholeTimes {
			before = beforeEndpoint(r)
		}
		g.BytesFromClient += fromClient
		g.BytesFromEndpoint += fromEndpoint
		if first {
			g.Answered++
			g.FirstByte.Add(time.Duration(r.FirstByte - before))
		}
		switch r.Event {
		case conntrack.Listed:
			g.Open++
			if r.State() == conntrack.Connecting {
				g.Connecting++
			}
			if unanswered {
				g.Waiting++
				g.Unserved = max(g.Unserved, time.Duration(r.Duration-before))
			}
		case conntrack.Opened:
			g.Opened++
			if r.Connected {
				g.Connect.Add(time.Duration(r.ConnectTime - before))
			}
		case conntrack.Ended:
			g.Ended++
			g.Lasted.Add(time.Duration(r.Duration))
			if !announced(r) {
				g.Opened++
			}
			if isFailure(r.End) {
				g.Failed++
			}
			if r.End.ByEndpoint() {
				g.Broken++
			}
			if unanswered {
				g.Unanswered++
				g.Unserved = max(g.Unserved, time.Duration(r.Duration-before))
			}
		}
	}
	if r.Event == conntrack.Opened && r.Protocol != service.UDP || r.Event == conntrack.Ended && (r.Protocol == service.UDP || !r.Connected) {
		var saved uint64 // of each attempt
		if r.Connected || r.Protocol == service.UDP && int(r.Attempts) > len(r.Failed) {
			saved = 1
		}
		for i := range r.Failed {
			g := m.group(r, r.Failed[i].Endpoint)
			g.FailedAttempts++
			g.SavedAttempts += saved
		}
		m.total.FailedAttempts += uint64(len(r.Failed))
		m.total.SavedAttempts += saved * uint64(len(r.Failed))
	}
}

// beforeEndpoint returns how long a connection waited and tried other endpoints, in ns.
func beforeEndpoint(r *conntrack.Record) int64 {
	before := r.WaitTime()
	for i := range r.Failed {
		before += r.Failed[i].Duration
	}
	return before
}

// announced reports whether an ended connection had an Opened record.
func announced(r *conntrack.Record) bool {
	return r.Connected || r.Protocol == service.UDP && r.SourceAddr.IsValid()
}

// isDue reports whether the interval is over.
func (m *Meter) isDue(now time.Time) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.isDueLocked(now)
}

func (m *Meter) isDueLocked(now time.Time) bool { return now.Sub(m.began) >= m.options.Interval-tick/4 }

// endInterval makes a frame if the interval is over.
func (m *Meter) endInterval(now time.Time, lost uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lost += lost
	if !m.isDueLocked(now) {
		return
	}
	f := &Frame{Time: now, Length: now.Sub(m.began), Total: m.total, Lost: m.lost, Groups: make([]*Group, 0, len(m.groups)+1)}
	copies := make([]Group, 0, len(m.groups)+1) // in one piece of memory
	give := func(g *Group) {
		copies = append(copies, *g)
		f.Groups = append(f.Groups, &copies[len(copies)-1])
		g.reset()
	}
	m.began, m.lost = now, 0
	m.total.reset()
	for k, g := range m.groups {
		switch {
		case g.busy():
			g.quiet = 0
		case g.quiet >= quietFrames:
			delete(m.groups, k)
			continue
		default:
			g.quiet++
		}
		give(g)
	}
	if m.other.Open > 0 || m.other.Ended > 0 {
		give(&m.other)
	}
	m.frame = f // one that was not read is lost, as it is out of date
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// reset begins a new interval.
func (g *Group) reset() {
	*g = Group{Key: g.Key, Endpoint: g.Endpoint, Open: g.Open, Connecting: g.Connecting, Waiting: g.Waiting, quiet: g.quiet}
}

// take returns the frame that was not read yet, or nil.
func (m *Meter) take() *Frame {
	m.mu.Lock()
	defer m.mu.Unlock()
	f := m.frame
	m.frame = nil
	return f
}

// ratings are what groups are sorted by, largest first.
var ratings = map[string]func(g *Group) float64{
	"open":     func(g *Group) float64 { return float64(g.Open) },
	"opened":   func(g *Group) float64 { return float64(g.Opened) },
	"bytes":    func(g *Group) float64 { return float64(g.BytesFromClient + g.BytesFromEndpoint) },
	"failed":   func(g *Group) float64 { return float64(g.Failed + g.FailedAttempts) },
	"connect":  func(g *Group) float64 { return float64(g.Connect.Quantile(0.99)) },
	"first":    func(g *Group) float64 { return float64(g.FirstByte.Quantile(0.99)) },
	"duration": func(g *Group) float64 { return float64(g.Lasted.Quantile(0.99)) },
	"received": func(g *Group) float64 { return float64(g.BytesFromClient) },
	"sent":     func(g *Group) float64 { return float64(g.BytesFromEndpoint) },
}

// Ratings returns the names of what groups can be sorted by, sorted; "name" is
// another.
func Ratings() []string {
	return append(slices.Sorted(maps.Keys(ratings)), "name")
}

// Sort sorts the groups of a frame, the largest first, or by name. Equal ones are
// sorted by name.
func (f *Frame) Sort(by string) error {
	rating, ok := ratings[by]
	if !ok && by != "name" {
		return fmt.Errorf("sort %q: not one of %s", by, strings.Join(Ratings(), ", "))
	}
	if ok {
		for _, g := range f.Groups { // once each, as quantiles take time
			g.rank = rating(g)
		}
	}
	slices.SortFunc(f.Groups, func(a, b *Group) int {
		if ok && a.rank != b.rank {
			return cmp.Compare(b.rank, a.rank)
		}
		return a.Key.compare(&b.Key)
	})
	return nil
}

func (k *Key) compare(o *Key) int {
	return cmp.Or(k.Service.Compare(o.Service), k.Endpoint.Compare(o.Endpoint), k.Client.Compare(o.Client), cmp.Compare(k.Node, o.Node))
}
