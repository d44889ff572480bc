package service

import (
	"fmt"
	"time"
)

// Never is a timeout that does not come.
const Never = time.Duration(-1)

const (
	idleTimeout       = "idle-timeout"
	halfClosedTimeout = "half-closed-timeout"
	drain             = "drain"
	hold              = "hold"
	rebalance         = "rebalance"
	slowStart         = "slow-start"
)

// bounded is an annotation whose value is a duration within bounds.
type bounded struct {
	shortest  time.Duration
	longest   time.Duration
	otherwise string // what a wrong value means
}

var durations = map[string]bounded{
	drain:        {time.Second, 24 * time.Hour, "connections stay with endpoints that went"},
	slowStart:    {time.Second, time.Hour, "new endpoints have their full share at once"},
	queueTimeout: {time.Millisecond, 10 * time.Minute, "connections at a limit are reset at once"},
	hold:         {time.Second, 10 * time.Minute, "nothing waits for endpoints"},
	rebalance:    {time.Second, time.Hour, "no idle connection is closed"},
}

// parse reads the value of the annotation.
func (b bounded) parse(name, text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d < b.shortest || d > b.longest {
		return 0, fmt.Errorf("%s: %q is not a duration such as 30s, of %s to %s", name, text, b.shortest, b.longest)
	}
	return d, nil
}

// duration returns the value of such an annotation, or 0 if it is missing or wrong.
func (s *spec) duration(name string) time.Duration {
	text, ok := s.annotations[name]
	if !ok {
		return 0
	}
	b := durations[name]
	d, err := b.parse(name, text)
	if err != nil {
		s.problemf("annotation %s%v; %s", annotationPrefix, err, b.otherwise)
	}
	return d
}

// parseTimeout reads the idle timeout of connections: a duration, or 0 for Never.
func parseTimeout(name, text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	switch {
	case err != nil || d < 0 || d > 0 && d < time.Second:
		return 0, fmt.Errorf("%s: %q is not a duration such as 30m, of 1s or more, or 0 for never", name, text)
	case d == 0:
		return Never, nil
	}
	return d, nil
}

// timeout returns the value of an annotation, or 0 if it is missing or wrong.
func (s *spec) timeout(name string) time.Duration {
	text, ok := s.annotations[name]
	if !ok {
		return 0
	}
	d, err := parseTimeout(name, text)
	if err != nil {
		s.problemf("annotation %s%v; its connections get the default", annotationPrefix, err)
	}
	return d
}

// QuietFor returns how long a connection of the port may be quiet; 0 means for ever.
// idle and halfClosed are the defaults, which a nil port has too.
func (p *Port) QuietFor(isHalfClosed bool, idle, halfClosed time.Duration) time.Duration {
	limit := idle
	if p != nil && p.IdleTimeout != 0 {
		limit = max(p.IdleTimeout, 0)
	}
	if !isHalfClosed {
		return limit
	}
	if p != nil && p.HalfClosedTimeout != 0 {
		halfClosed = max(p.HalfClosedTimeout, 0)
	}
	if halfClosed == 0 || limit != 0 && limit < halfClosed {
		return limit
	}
	return halfClosed
}
