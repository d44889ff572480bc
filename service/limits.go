package service

import (
	"fmt"
	"strconv"
	"time"
)

const (
	maxConnections = "max-connections"
	maxPerEndpoint = "max-connections-per-endpoint"
	queueTimeout   = "queue-timeout"

	mostOfALimit = 1_000_000
)

// Limits are those of a Service's connections, on this node. The zero value limits nothing.
type Limits struct {
	// Connections bounds those of the whole Service, and PerEndpoint those of each
	// endpoint of a service port; 0 = not at all.
	Connections, PerEndpoint int
	// Queue is how long a connection waits at a limit.
	Queue time.Duration
}

// Any reports whether there is a limit.
func (l *Limits) Any() bool { return l.Connections > 0 || l.PerEndpoint > 0 }

// parseLimit reads a number of connections.
func parseLimit(name, text string) (int, error) {
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > mostOfALimit {
		return 0, fmt.Errorf("%s: %q is not a number from 1 to %d", name, text, mostOfALimit)
	}
	return n, nil
}

// limit returns the value of an annotation, or 0 if it is missing or wrong.
func (s *spec) limit(name string) int {
	text, ok := s.annotations[name]
	if !ok {
		return 0
	}
	n, err := parseLimit(name, text)
	if err != nil {
		s.problemf("annotation %s%v; there is no limit", annotationPrefix, err)
	}
	return n
}

// parseLimits reads the annotations of limits.
func (s *spec) parseLimits() {
	s.limits = Limits{Connections: s.limit(maxConnections), PerEndpoint: s.limit(maxPerEndpoint), Queue: s.duration(queueTimeout)}
	if s.limits.Queue > 0 && !s.limits.Any() {
		s.problemf("annotation %s%s has no effect without a limit (%s, %s)", annotationPrefix, queueTimeout, maxConnections, maxPerEndpoint)
	}
}
