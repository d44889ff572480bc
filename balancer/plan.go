package balancer

import "time"

// Plan says how long a connection attempt may take, when to try again, and when
// to give up.
type Plan struct {
	// Timeouts are the steps of patience. An attempt that runs out of time
	// uses one up; an attempt that is refused does not. Their sum is how long
	// endpoints that refuse are tried again.
	Timeouts []time.Duration
	// After is the patience once the steps are used up and there are still
	// endpoints that were not tried.
	After time.Duration
	// Total is the time after which no attempt is begun, counted from the
	// first one. The last attempt's time is cut so that it ends then.
	Total time.Duration
	// AtOnce bounds the attempts of one connection that follow each other
	// without a pause.
	AtOnce int
}

// The pauses before endpoints that refused are tried again: they double from the
// shortest to the longest. With the default plan that makes attempts after 50,
// 150, 350 and 750 ms, 1.5, 2.25, 3 and 3.7 s.
const (
	shortestPause = 50 * time.Millisecond
	longestPause  = 750 * time.Millisecond
)

// DefaultPlan gives the steps of kube-proxy's userspace mode: 250 ms, 500 ms,
// 1 s, 2 s, so that a connection to a service whose first endpoints are dead
// waits 3.75 s at most; then 250 ms for each further endpoint, and 15 s in all.
func DefaultPlan() Plan {
	return Plan{
		Timeouts: []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second},
		After:    250 * time.Millisecond,
		Total:    15 * time.Second,
		AtOnce:   128,
	}
}

// orDefault fills in what is zero.
func (p Plan) orDefault() Plan {
	def := DefaultPlan()
	if len(p.Timeouts) == 0 {
		p.Timeouts = def.Timeouts
	}
	if p.After <= 0 {
		p.After = def.After
	}
	if p.Total <= 0 {
		p.Total = def.Total
	}
	if p.AtOnce <= 0 {
		p.AtOnce = def.AtOnce
	}
	return p
}

// patience gives the time that an attempt at this step may take.
func (p *Plan) patience(step uint8) time.Duration {
	if int(step) < len(p.Timeouts) {
		return p.Timeouts[step]
	}
	return p.After
}

// all gives the sum of the timeouts: the time for which endpoints that refuse
// are tried again.
func (p *Plan) all() time.Duration {
	var sum time.Duration
	for _, t := range p.Timeouts {
		sum += t
	}
	return min(sum, p.Total)
}
