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
	hold              = "hold"

	longestHold = 10 * time.Minute
)

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

// parseHold reads how long connections wait for endpoints.
func parseHold(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Second || d > longestHold {
		return 0, fmt.Errorf("%s: %q is not a duration such as 30s, of 1s to %s", hold, text, longestHold)
	}
	return d, nil
}

// parseHeld reads the annotation hold. A wrong one has no effect.
func (s *spec) parseHeld() {
	if text, ok := s.annotations[hold]; ok {
		var err error
		if s.hold, err = parseHold(text); err != nil {
			s.problemf("annotation %s%v; nothing waits for endpoints", annotationPrefix, err)
		}
	}
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
