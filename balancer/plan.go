package balancer

import "time"

// Plan says how long a connection attempt may take and when to give up.
type Plan struct {
	// Timeouts are the steps of patience. An attempt that runs out of time
	// uses one up; an attempt that is refused does not. Their number is also
	// the least number of attempts that are made before a connection fails.
	Timeouts []time.Duration
	// After is the patience once the steps are used up and there are still
	// endpoints that were not tried.
	After time.Duration
	// Total is the time after which no attempt is begun, counted from the
	// first one. The last attempt's time is cut so that it ends then.
	Total time.Duration
}

// DefaultPlan gives the steps of kube-proxy's userspace mode: 250 ms, 500 ms,
// 1 s, 2 s, so that a connection to a service whose first endpoints are dead
// waits 3.75 s at most; then 250 ms for each further endpoint, and 15 s in all.
func DefaultPlan() Plan {
	return Plan{
		Timeouts: []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second},
		After:    250 * time.Millisecond,
		Total:    15 * time.Second,
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
	return p
}

// patience gives the time that an attempt at this step may take.
func (p *Plan) patience(step uint8) time.Duration {
	if int(step) < len(p.Timeouts) {
		return p.Timeouts[step]
	}
	return p.After
}
