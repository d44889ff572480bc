// Package slow finds the endpoints that answer later than others of the same Service
// port. It does no I/O.
package slow

import (
	"cmp"
	"slices"

	"github.com/sluice-proxy/sluice/live/api"
)

// Endpoint is a slow endpoint, with its figures beside those of the other endpoints of
// its Service port, its siblings. Times are microseconds from the acceptance of a
// connection; those of siblings are medians over the siblings.
type Endpoint struct {
	api.Rates
	Siblings            int   `json:"siblings"`
	SiblingConnectP50US int64 `json:"sibling_connect_p50_us"`
	SiblingFirstP50US   int64 `json:"sibling_first_byte_p50_us"`
	SiblingFirstP99US   int64 `json:"sibling_first_byte_p99_us"`
	// Late says what is late: Handshake or Answer.
	Late string `json:"late"`
}

// What is late.
const (
	Handshake = "handshake" // the network to the pod, or a full queue of its listener
	Answer    = "answer"    // the pod's program
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
	ports := make(map[port][]api.Rates)
	for _, r := range rows {
		if r.FirstP50US > 0 && r.Endpoint != "" {
			p := port{r.Service, r.Protocol}
			ports[p] = append(ports[p], r)
		}
	}
	for _, all := range ports {
		if len(all) == 1 {
			found.Alone++
			continue
		}
		found.Compared += len(all)
		for i, r := range all {
			siblings := slices.Delete(slices.Clone(all), i, i+1)
			e := Endpoint{
				Rates:               r,
				Siblings:            len(siblings),
				SiblingConnectP50US: median(siblings, func(r *api.Rates) int64 { return r.ConnectP50US }),
				SiblingFirstP50US:   median(siblings, func(r *api.Rates) int64 { return r.FirstP50US }),
				SiblingFirstP99US:   median(siblings, func(r *api.Rates) int64 { return r.FirstP99US }),
			}
			if e.isSlow() {
				e.Late = e.late()
				found.Slow = append(found.Slow, e)
			}
		}
	}
	slices.SortFunc(found.Slow, func(a, b Endpoint) int {
		return cmp.Or(cmp.Compare(b.excess(), a.excess()), cmp.Compare(a.Service, b.Service), cmp.Compare(a.Endpoint, b.Endpoint))
	})
	return found
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

// excess is how much later than its siblings an endpoint answers.
func (e *Endpoint) excess() int64 {
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
