package live

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/live/filter"
)

const (
	// historyInterval is the length of an interval of a History.
	historyInterval = 5 * time.Second
	// historyIntervals is how many intervals are kept: 15 minutes.
	historyIntervals = 180
	// historyAttention is how long a History goes on after somebody asked.
	historyAttention = 2 * time.Minute

	// Bounds of an interval: it keeps the busiest groups. Each takes 48 bytes in each
	// interval: 26 MiB at most.
	historyServices  = 1024
	historyEndpoints = 2048
	// maxSeries bounds the groups whose names are kept: 3 MiB.
	maxSeries = 8192
)

// History keeps the rates of the last 15 minutes: those of all connections, of each
// service port, and of each endpoint of a service port. It measures while somebody
// asks. It is safe for concurrent use.
type History struct {
	view  *View
	clock func() time.Time

	mu        sync.Mutex
	always    bool
	running   bool
	asked     time.Time
	began     time.Time
	sequence  uint64 // number of the last interval
	reads     uint64
	intervals []interval
	series    map[Key]*series
}

// interval is what happened in some seconds.
type interval struct {
	Interval
	total  Point
	points []point
}

// point is one series in an interval.
type point struct {
	series *series
	Point
}

// series is a group that has points.
type series struct {
	name SeriesName
	used uint64 // number of the last interval that has a point of it

	// Of the Read in progress.
	read uint64 // its number
	rank float64
	row  int // in the answer, or -1
}

// Interval describes an interval.
type Interval struct {
	Time   time.Time // its end
	Length time.Duration
	Lost   uint64 // records that could not be counted
	// LeftOut are connections that opened in it and belong to no series but that of
	// all connections.
	LeftOut uint64
}

// Point is what happened to a group in an interval.
type Point struct {
	Open, Opened, Failed, FailedAttempts uint32
	FromClient, FromEndpoint             float32 // bytes
	ConnectP50, ConnectP99               uint32  // us; 0 if no connection reached an endpoint
	FirstP50, FirstP99                   uint32  // us until the first byte; 0 without one
}

// SeriesName says what a series is of. It is zero for all connections together; Key
// has no endpoint for a service port.
type SeriesName struct {
	Key
	Pod, Zone string
}

// Series is a group over time.
type Series struct {
	SeriesName
	Points []Point // one for each interval
}

// Window is what a History knows of some time.
type Window struct {
	Began     time.Time // when measuring began
	Intervals []Interval
	Matched   int // how many series match; Series has at most as many as were asked for
	Series    []Series
}

// Question selects series of a History.
type Question struct {
	By    Dimension // 0: all connections together; ByService; or both ByService and ByEndpoint
	Match func(*SeriesName) bool
	Since time.Time // only intervals that end after it
	Sort  string    // one of Ratings
	Limit int
}

// NewHistory returns a History of a View's connections. It measures while somebody
// asks, or always.
func NewHistory(v *View, always bool) (*History, error) {
	h := &History{view: v, always: always, clock: time.Now}
	if always {
		h.mu.Lock()
		defer h.mu.Unlock()
		return h, h.begin()
	}
	return h, nil
}

// begin begins to measure. h.mu is held.
func (h *History) begin() error {
	if h.running {
		return nil
	}
	m, err := h.view.Meter(MeterOptions{Filter: &filter.Filter{}, By: ByService | ByEndpoint, Interval: historyInterval, WholeTimes: true})
	if err != nil {
		return err
	}
	h.running, h.began, h.series = true, h.clock(), make(map[Key]*series)
	go h.measure(m)
	return nil
}

// measure adds intervals until nobody asks any more.
func (h *History) measure(m *Meter) {
	defer m.Close()
	for {
		f, err := m.Next(context.Background())
		if err != nil || !h.add(f) {
			return
		}
	}
}

// add adds an interval. It returns false, and forgets everything, if nobody has asked
// for a while.
func (h *History) add(f *Frame) (more bool) {
	services := make(map[Key]*Group)
	var endpoints []*Group
	for _, g := range f.Groups {
		if g.Key == (Key{}) {
			continue // no service, or beyond the bound of the Meter
		}
		k := Key{Service: g.Key.Service}
		if services[k] == nil {
			services[k] = &Group{Key: k}
		}
		services[k].add(g)
		if g.Key.Endpoint.IsValid() {
			endpoints = append(endpoints, g)
		}
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.always && h.clock().Sub(h.asked) > historyAttention {
		h.running, h.intervals, h.series = false, nil, nil
		return false
	}
	h.sequence++
	n := interval{Interval: Interval{Time: f.Time, Length: f.Length, Lost: f.Lost}, total: pointOf(&f.Total)}
	n.points = make([]point, 0, min(len(services), historyServices)+min(len(endpoints), historyEndpoints))
	left := f.Total.Opened
	for _, g := range busiest(slices.Collect(maps.Values(services)), historyServices) {
		if h.append(&n, g) {
			left -= min(left, g.Opened)
		}
	}
	n.LeftOut = left
	for _, g := range busiest(endpoints, historyEndpoints) {
		h.append(&n, g)
	}
	h.intervals = append(h.intervals, n)
	h.trim()
	maps.DeleteFunc(h.series, func(_ Key, s *series) bool { return s.used+historyIntervals <= h.sequence })
	return true
}

// busiest returns at most a number of groups, those with most connections.
func busiest(all []*Group, most int) []*Group {
	if len(all) <= most {
		return all
	}
	slices.SortFunc(all, func(a, b *Group) int {
		return cmp.Or(cmp.Compare(b.Opened, a.Opened), cmp.Compare(b.FailedAttempts, a.FailedAttempts), cmp.Compare(b.Open, a.Open), a.Key.compare(&b.Key))
	})
	return all[:most]
}

// append adds a group to an interval. It returns false if there are too many series.
func (h *History) append(n *interval, g *Group) bool {
	s := h.series[g.Key]
	if s == nil {
		if len(h.series) >= maxSeries {
			return false
		}
		s = &series{name: SeriesName{Key: g.Key}}
		h.series[g.Key] = s
	}
	if ep := g.Endpoint; ep != nil {
		s.name.Pod, s.name.Node, s.name.Zone = ep.PodName(), ep.Node(), ep.Zone()
	}
	s.used = h.sequence
	n.points = append(n.points, point{s, pointOf(g)})
	return true
}

func pointOf(g *Group) Point {
	us := func(d *Durations, q float64) uint32 { return uint32(d.Quantile(q).Microseconds()) }
	return Point{
		Open: uint32(g.Open), Opened: uint32(g.Opened), Failed: uint32(g.Failed), FailedAttempts: uint32(g.FailedAttempts),
		FromClient: float32(g.BytesFromClient), FromEndpoint: float32(g.BytesFromEndpoint),
		ConnectP50: us(&g.Connect, 0.5), ConnectP99: us(&g.Connect, 0.99), FirstP50: us(&g.FirstByte, 0.5), FirstP99: us(&g.FirstByte, 0.99),
	}
}

// rank is the part of a Point by which series are sorted.
func (p *Point) rank(sort string) float64 {
	switch sort {
	case "open":
		return float64(p.Open)
	case "bytes":
		return float64(p.FromClient) + float64(p.FromEndpoint)
	case "received":
		return float64(p.FromClient)
	case "sent":
		return float64(p.FromEndpoint)
	case "failed":
		return float64(p.Failed) + float64(p.FailedAttempts)
	case "connect":
		return float64(p.ConnectP99)
	case "first":
		return float64(p.FirstP99)
	case "opened":
		return float64(p.Opened)
	}
	return 0
}

// Read answers a question, and has the History go on for a while.
func (h *History) Read(q Question) (*Window, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asked = h.clock()
	if err := h.begin(); err != nil {
		return nil, err
	}
	from := len(h.intervals)
	for from > 0 && h.intervals[from-1].Time.After(q.Since) {
		from--
	}
	intervals := h.intervals[from:]
	w := &Window{Began: h.began, Intervals: make([]Interval, 0, len(intervals))}
	for i := range intervals {
		w.Intervals = append(w.Intervals, intervals[i].Interval)
	}
	if q.By == 0 {
		all := Series{Points: make([]Point, len(intervals))}
		for i := range intervals {
			all.Points[i] = intervals[i].total
		}
		w.Matched, w.Series = 1, []Series{all}
		return w, nil
	}
	h.pick(w, intervals, q)
	for i := range intervals {
		for j := range intervals[i].points {
			if p := &intervals[i].points[j]; p.series.read == h.reads && p.series.row >= 0 {
				w.Series[p.series.row].Points[i] = p.Point
			}
		}
	}
	return w, nil
}

// pick finds the series that a question asks for, and gives each its row.
func (h *History) pick(w *Window, intervals []interval, q Question) {
	h.reads++
	var found []*series
	for i := range intervals {
		for j := range intervals[i].points {
			p := &intervals[i].points[j]
			s := p.series
			if s.read != h.reads {
				s.read, s.rank, s.row = h.reads, 0, -1
				if s.name.Endpoint.IsValid() == (q.By&ByEndpoint != 0) && q.Match(&s.name) {
					s.row = 0
					found = append(found, s)
				}
			}
			s.rank += p.rank(q.Sort)
		}
	}
	slices.SortFunc(found, func(a, b *series) int {
		return cmp.Or(cmp.Compare(b.rank, a.rank), a.name.compare(&b.name.Key))
	})
	w.Matched = len(found)
	for i, s := range found {
		if i >= q.Limit {
			s.row = -1
			continue
		}
		s.row = i
		w.Series = append(w.Series, Series{SeriesName: s.name, Points: make([]Point, len(intervals))})
	}
}
