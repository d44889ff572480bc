package balancer

import (
	"cmp"
	"fmt"
	"strings"
	"time"
)

// Plan is the retry schedule of one connection.
type Plan struct {
	// Timeouts are the timeouts of successive attempts. An attempt that times
	// out consumes one; a refused attempt does not. Refusing endpoints are
	// retried until the sum of Timeouts has passed.
	Timeouts []time.Duration
	// After is the timeout of attempts once Timeouts are consumed, for endpoints
	// that were not tried before.
	After time.Duration
	// Total is the time, from the first attempt, after which no attempt begins
	// or continues.
	Total time.Duration
	// AtOnce bounds the attempts of one connection without a pause.
	AtOnce int
}

// Pauses before a refusing endpoint is retried double from the shortest to the
// longest. With the default plan, retries happen after 50, 150, 350 and 750 ms,
// 1.5, 2.25, 3 and 3.7 s.
const (
	shortestPause = 50 * time.Millisecond
	longestPause  = 750 * time.Millisecond
)

// DefaultPlan returns the timeouts of kube-proxy's userspace mode: 250 ms, 500 ms,
// 1 s, 2 s. A connection whose first four endpoints are dead waits 3.75 s. Each
// further endpoint gets 250 ms, and all attempts together 15 s.
func DefaultPlan() Plan {
	return Plan{
		Timeouts: []time.Duration{250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2 * time.Second},
		After:    250 * time.Millisecond,
		Total:    15 * time.Second,
		AtOnce:   128,
	}
}

// mostTimeouts and longestTimeout bound the annotation of a Service.
const (
	mostTimeouts   = 16
	longestTimeout = 15 * time.Second
)

// parseTimeouts reads a list of durations such as "250ms,500ms".
func parseTimeouts(value string) (list []time.Duration, err error) {
	for text := range strings.SplitSeq(value, ",") {
		d, err := time.ParseDuration(strings.TrimSpace(text))
		if err != nil || d < time.Millisecond || d > longestTimeout || len(list) == mostTimeouts {
			return nil, fmt.Errorf("%s: %q is not a list of 1 to %d durations such as 250ms,500ms,1s, each of 1ms to %s", dialAnnotation, value, mostTimeouts, longestTimeout)
		}
		list = append(list, d)
	}
	return list, nil
}

// orDefault replaces zero fields with those of DefaultPlan.
func (p Plan) orDefault() Plan {
	def := DefaultPlan()
	if len(p.Timeouts) == 0 {
		p.Timeouts = def.Timeouts
	}
	p.After, p.Total, p.AtOnce = cmp.Or(p.After, def.After), cmp.Or(p.Total, def.Total), cmp.Or(p.AtOnce, def.AtOnce)
	return p
}

// patience returns the timeout of an attempt at this step.
func (p *Plan) patience(step uint8) time.Duration {
	if int(step) < len(p.Timeouts) {
		return p.Timeouts[step]
	}
	return p.After
}

// all returns the sum of Timeouts, for which refusing endpoints are retried.
func (p *Plan) all() time.Duration {
	var sum time.Duration
	for _, t := range p.Timeouts {
		sum += t
	}
	return min(sum, p.Total)
}
