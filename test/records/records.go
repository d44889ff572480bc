// Package records keeps the records of a test's connections.
package records

import (
	"slices"
	"sync"
	"testing"

	"github.com/sluice-proxy/sluice/conntrack"
)

// Sink keeps what a table writes. While it is locked, the table waits.
type Sink struct {
	sync.Mutex
	list []conntrack.Record // guarded by the Mutex
}

var _ conntrack.Sink = (*Sink)(nil)

// Write implements conntrack.Sink.
func (s *Sink) Write(batch []conntrack.Record) {
	s.Lock()
	defer s.Unlock()
	s.list = append(s.list, batch...)
}

// Flush implements conntrack.Sink.
func (s *Sink) Flush() {}

// All returns the records.
func (s *Sink) All() []conntrack.Record {
	s.Lock()
	defer s.Unlock()
	return slices.Clone(s.list)
}

// Ends counts the records by their end.
func (s *Sink) Ends() map[conntrack.End]int {
	ends := make(map[conntrack.End]int)
	for _, r := range s.All() {
		ends[r.End]++
	}
	return ends
}

// Ended fails the test unless so many records have each of some ends.
func (s *Sink) Ended(t testing.TB, want map[conntrack.End]int) {
	t.Helper()
	got := s.Ends()
	for end, n := range want {
		if got[end] != n {
			t.Errorf("the records end with %v, want %v among them", got, want)
			return
		}
	}
}
