package live

import (
	"slices"
	"time"
)

const (
	// mostMovedPoints bounds the points that a History gives to the next process.
	mostMovedPoints = 100_000
	// movedPoints bounds the points of a MovedHistory, but for those of its last series.
	movedPoints = 100
)

// MovedHistory is a part of a History on its way to the process that takes over. The first one has
// the intervals, the others series.
type MovedHistory struct {
	Began     time.Time       `json:",omitzero"`
	Intervals []MovedInterval `json:",omitempty"`
	Series    []MovedSeries   `json:",omitempty"`
}

// MovedInterval is an interval and what happened to all connections in it.
type MovedInterval struct {
	Interval
	Total Point
}

// MovedSeries is a group with its points.
type MovedSeries struct {
	SeriesName
	At     []int64 // Unix ns: the end of each point's interval
	Points []Point
}

// Move gives what the History knows, the latest points if there are too many. It stops at the first
// error of give.
func (h *History) Move(give func(*MovedHistory) error) error {
	first, all := h.moved()
	if len(first.Intervals) == 0 {
		return nil
	}
	err := give(&first)
	for part, points := (MovedHistory{}), 0; err == nil && len(all) > 0; {
		part.Series = append(part.Series, *all[0])
		points += len(all[0].Points)
		if all = all[1:]; points >= movedPoints || len(all) == 0 {
			err = give(&part)
			part, points = MovedHistory{}, 0
		}
	}
	return err
}

// moved returns the intervals, and the series.
func (h *History) moved() (first MovedHistory, all []*MovedSeries) {
	h.mu.Lock()
	defer h.mu.Unlock()
	first.Began = h.began
	from, points := len(h.intervals), 0
	for from > 0 && points+len(h.intervals[from-1].points) <= mostMovedPoints {
		from--
		points += len(h.intervals[from].points)
	}
	rows := make(map[*series]*MovedSeries)
	for i := range h.intervals[from:] {
		n := &h.intervals[from+i]
		first.Intervals = append(first.Intervals, MovedInterval{n.Interval, n.total})
		for j := range n.points {
			p := &n.points[j]
			row := rows[p.series]
			if row == nil {
				row = &MovedSeries{SeriesName: p.series.name}
				rows[p.series], all = row, append(all, row)
			}
			row.At, row.Points = append(row.At, n.Time.UnixNano()), append(row.Points, p.Point)
		}
	}
	return first, all
}

// Carry adds what another process knows of the time before. It goes on for a while, as after a Read.
func (h *History) Carry(m *MovedHistory) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n := len(m.Intervals); n > 0 {
		h.asked = h.clock()
		if err := h.begin(); err != nil {
			return err
		}
		before := make([]interval, 0, historyIntervals)
		for _, i := range m.Intervals[max(n-historyIntervals, 0):] {
			before = append(before, interval{Interval: i.Interval, total: i.Total})
		}
		last := m.Intervals[n-1].Time
		h.intervals = append(before, slices.DeleteFunc(h.intervals, func(i interval) bool { return !i.Time.After(last) })...)
		h.trim()
		h.began = m.Began
	}
	for i := range m.Series {
		h.carrySeries(&m.Series[i])
	}
	return nil
}

// carrySeries adds the points of a group. h.mu is held.
func (h *History) carrySeries(m *MovedSeries) {
	key := m.Key
	key.Node = "" // it is the endpoint's
	s := h.series[key]
	if s == nil {
		if len(h.series) >= maxSeries || !h.running {
			return
		}
		s = &series{name: m.SeriesName}
		h.series[key] = s
	}
	s.used = h.sequence
	for i, at := range m.At[:min(len(m.At), len(m.Points))] {
		to, found := slices.BinarySearchFunc(h.intervals, at, func(n interval, at int64) int { return n.Time.Compare(time.Unix(0, at)) })
		if n := len(h.intervals); found && to < n && len(h.intervals[to].points) < historyServices+historyEndpoints {
			h.intervals[to].points = append(h.intervals[to].points, point{s, m.Points[i]})
		}
	}
}

// trim forgets the oldest intervals. h.mu is held.
func (h *History) trim() {
	h.intervals = slices.Delete(h.intervals, 0, max(len(h.intervals)-historyIntervals, 0))
}
