// Package slow finds the endpoints that answer later than others of the same Service
// port, or not at all. It does no I/O.
package slow

import (
	"cmp"
	"slices"

	"github.com/sluice-proxy/sluice/live/api"
)

// Endpoint is a slow endpoint, with its figures beside those of the other endpoints of
// its Service port, its siblings. Times are microseconds from the attempt at this
// endpoint; those of siblings are medians over the siblings.
type Endpoint struct {
	api.Rates
	Siblings            int   `json:"siblings"`
	SiblingConnectP50US int64 `json:"sibling_connect_p50_us"`
	SiblingFirstP50US   int64 `json:"sibling_first_byte_p50_us"`
	SiblingFirstP99US   int64 `json:"sibling_first_byte_p99_us"`
	// Late says what is late: Handshake, Answer or NoAnswer.
	Late string `json:"late"`
}

// What is late.
const (
	Handshake = "handshake" // the network to the pod, or a full queue of its listener
	Answer    = "answer"    // the pod's program
	NoAnswer  = "no answer" // the pod's program takes requests and sends nothing
)

// An endpoint is slow if half of its first bytes come medianTimes as late as its siblings'
// and medianMore later, or one of a hundred tailTimes as late and tailMore later.
const (
	medianTimes, medianMore = 2, 5_000 // us
	tailTimes, tailMore     = 4, 20_000
)

// Found is what Find has found.
type Found struct {
	Slow     []Endpoint
	Compared int // endpoints that were compared with a sibling
	Alone    int // endpoints that answered and have no sibling that did
}

// Find looks through the rates by Service and endpoint. The slowest comes first.
func Find(rows []api.Rates) Found {
	var found Found
	type port struct{ service, protocol string }
	type rated struct{ answering, silent []api.Rates }
	ports := make(map[port]*rated)
	for _, r := range rows {
		p := port{r.Service, r.Protocol}
		if ports[p] == nil {
			ports[p] = new(rated)
		}
		switch {
		case r.Endpoint == "":
		case isSilent(&r):
			ports[p].silent = append(ports[p].silent, r)
		case r.FirstP50US > 0:
			ports[p].answering = append(ports[p].answering, r)
		}
	}
	for _, p := range ports {
		all := len(p.answering) + len(p.silent)
		if len(p.answering) == 0 || all == 1 {
			found.Alone += all
			continue
		}
		found.Compared += all
		for i, r := range p.answering {
			if len(p.answering) == 1 {
				break // only silent ones beside it
			}
			e := beside(r, slices.Delete(slices.Clone(p.answering), i, i+1))
			if e.isSlow() {
				e.Late = e.late()
				found.Slow = append(found.Slow, e)
			}
		}
		for _, r := range p.silent {
			e := beside(r, p.answering)
			if farther(r.UnansweredUS, e.SiblingFirstP99US, tailTimes, tailMore) {
				e.Late = NoAnswer
				found.Slow = append(found.Slow, e)
			}
		}
	}
	slices.SortFunc(found.Slow, func(a, b Endpoint) int { return Compare(&a, &b) })
	return found
}

// Compare sorts the slowest first.
func Compare(a, b *Endpoint) int {
	return cmp.Or(cmp.Compare(b.excess(), a.excess()), cmp.Compare(a.Service, b.Service), cmp.Compare(a.Endpoint, b.Endpoint))
}

// isSilent reports whether an endpoint leaves more requests unanswered than it answers.
func isSilent(r *api.Rates) bool {
	return r.Unanswered > r.Answered || r.Answered == 0 && r.Waiting > 0
}

// beside returns an endpoint with the figures of its siblings.
func beside(r api.Rates, siblings []api.Rates) Endpoint {
	return Endpoint{
		Rates:               r,
		Siblings:            len(siblings),
		SiblingConnectP50US: median(siblings, func(r *api.Rates) int64 { return r.ConnectP50US }),
		SiblingFirstP50US:   median(siblings, func(r *api.Rates) int64 { return r.FirstP50US }),
		SiblingFirstP99US:   median(siblings, func(r *api.Rates) int64 { return r.FirstP99US }),
	}
}

// median returns the lower median of a figure.
func median(rows []api.Rates, figure func(*api.Rates) int64) int64 {
	all := make([]int64, len(rows))
	for i := range rows {
		all[i] = figure(&rows[i])
	}
	slices.Sort(all)
	return all[(len(all)-1)/2]
}

func (e *Endpoint) isSlow() bool {
	return farther(e.FirstP50US, e.SiblingFirstP50US, medianTimes, medianMore) ||
		farther(e.FirstP99US, e.SiblingFirstP99US, tailTimes, tailMore)
}

func farther(us, siblings, times, more int64) bool {
	return us >= siblings*times && us >= siblings+more
}

// excess is how much later than its siblings an endpoint answers, in us.
func (e *Endpoint) excess() int64 {
	if e.Late == NoAnswer {
		return e.UnansweredUS - e.SiblingFirstP99US
	}
	return max(e.FirstP50US-e.SiblingFirstP50US, e.FirstP99US-e.SiblingFirstP99US)
}

// late says where most of the median's excess, or of the tail's, was spent.
func (e *Endpoint) late() string {
	connect, first := e.ConnectP50US-e.SiblingConnectP50US, e.FirstP50US-e.SiblingFirstP50US
	if !farther(e.FirstP50US, e.SiblingFirstP50US, medianTimes, medianMore) {
		connect, first = e.ConnectP99US-e.SiblingConnectP50US, e.FirstP99US-e.SiblingFirstP99US
	}
	if 2*connect > first {
		return Handshake
	}
	return Answer
}
