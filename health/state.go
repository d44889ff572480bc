// Package health reports the proxy's health to load balancers and to kubelet: a
// server for each healthCheckNodePort of the Services (A6.1 to A6.8), and /healthz
// and /livez of the proxy itself (A7.1 to A7.7). It does not touch the data path.
//
//	h := health.New(health.Options{Address: "0.0.0.0:10256", Logger: log})
//	defer h.Close()
//	h.Queued()       // a change arrived
//	h.Update(table)  // the new policy table
//	h.Applied()      // the change is in force
//
// If Applied does not follow Queued, the proxy becomes unhealthy after a minute.
package health

import (
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// Timeout is how long a change may wait before the proxy is unhealthy: twice
// kube-proxy's default syncPeriod (A7.1).
const Timeout = 60 * time.Second

// State is the health of the proxy: how long changes have waited, by family, and
// whether the node is eligible for traffic. It is safe for concurrent use.
type State struct {
	timeout time.Duration
	now     func() time.Time

	mu           sync.Mutex
	updated      [2]time.Time // by service.Family; zero before the first update
	pending      [2]time.Time // arrival of the oldest waiting change; zero if none waits
	nodeEligible bool
}

// NewState creates a healthy State without a node. now returns the time.
func NewState(timeout time.Duration, now func() time.Time) *State {
	return &State{timeout: timeout, now: now}
}

// Queued records a change of a family. Only the oldest waiting change counts
// (A7.1).
func (s *State) Queued(f service.Family) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending[f].IsZero() {
		s.pending[f] = s.now()
	}
}

// Updated records that all changes of a family are in force.
func (s *State) Updated(f service.Family) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending[f] = time.Time{}
	s.updated[f] = s.now()
}

// SetNode sets the current state of this node (A7.3).
func (s *State) SetNode(n *service.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nodeEligible = n.Found && !n.BeingDeleted
}

// FamilyReport is the health of one address family.
type FamilyReport struct {
	LastUpdated time.Time `json:"lastUpdated"`
	Healthy     bool      `json:"healthy"`
}

// Report is the body of /healthz and /livez (A7.4).
type Report struct {
	LastUpdated  time.Time `json:"lastUpdated"`
	CurrentTime  time.Time `json:"currentTime"`
	NodeEligible *bool     `json:"nodeEligible,omitempty"` // only in /healthz
	// Healthy is set if all families are healthy (A7.6), independent of the node.
	Healthy bool                    `json:"healthy"`
	Status  map[string]FamilyReport `json:"status,omitempty"`
}

var familyNames = [2]string{service.IPv4: "IPv4", service.IPv6: "IPv6"}

// Report returns the current health without the node. A family without any update
// is starting: it counts as healthy (A7.1) and is not in the status.
func (s *State) Report() Report {
	r, _ := s.report()
	return r
}

func (s *State) report() (r Report, nodeEligible bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r = Report{CurrentTime: s.now(), Healthy: true}
	for f, updated := range s.updated {
		if updated.IsZero() {
			continue
		}
		late := !s.pending[f].IsZero() && r.CurrentTime.Sub(s.pending[f]) >= s.timeout
		if r.Status == nil {
			r.Status = make(map[string]FamilyReport)
		}
		r.Status[familyNames[f]] = FamilyReport{LastUpdated: updated, Healthy: !late}
		r.Healthy = r.Healthy && !late
		if updated.After(r.LastUpdated) {
			r.LastUpdated = updated
		}
	}
	return r, s.nodeEligible
}

// Livez returns the body of /livez and whether it is 200 or 503 (A7.2).
func (s *State) Livez() (Report, bool) {
	r := s.Report()
	if r.Healthy {
		r.LastUpdated = r.CurrentTime
	}
	return r, r.Healthy
}

// Healthz returns the body of /healthz and whether it is 200 or 503 (A7.3).
func (s *State) Healthz() (Report, bool) {
	r, eligible := s.report()
	r.NodeEligible = &eligible
	if r.Healthy && eligible {
		r.LastUpdated = r.CurrentTime
	}
	return r, r.Healthy && eligible
}
