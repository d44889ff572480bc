package health

import (
	"encoding/json"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

// fakeClock is moved by the test.
type fakeClock struct{ t time.Time }

func newFakeClock() *fakeClock {
	return &fakeClock{time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)}
}

func (c *fakeClock) now() time.Time          { return c.t }
func (c *fakeClock) advance(d time.Duration) { c.t = c.t.Add(d) }

// TestState shows A7.1 and A7.6: only a change that waits too long makes a
// family unhealthy, and one family that is late makes the proxy unhealthy.
func TestState(t *testing.T) {
	const v4, v6 = service.IPv4, service.IPv6
	c := newFakeClock()
	s := NewState(time.Minute, c.now)
	check := func(step string, healthy bool) {
		t.Helper()
		check.Equalf(t, s.Report().Healthy, healthy, "%s: healthy", step)
	}
	check("A7.1 at the start", true)
	s.Queued(v4)
	c.advance(time.Hour)
	check("A7.1 never updated", true)
	s.Updated(v4)
	s.Updated(v6)
	c.advance(24 * time.Hour)
	check("A7.1 idle", true)
	s.Queued(v4)
	c.advance(59 * time.Second)
	check("A7.1 a change waits, not late yet", true)
	s.Queued(v4) // the oldest counts
	c.advance(time.Second)
	check("A7.1 late", false)
	s.Updated(v6)
	check("A7.6 the other family is updated", false)
	s.Updated(v4)
	check("A7.1 made up for", true)
	s.Queued(v6)
	c.advance(2 * time.Minute)
	s.Queued(v4)
	s.Updated(v4)
	check("A7.6 IPv6 is late, IPv4 goes on", false)
	r := s.Report()
	if !r.Status["IPv4"].Healthy || r.Status["IPv6"].Healthy {
		t.Errorf("A7.6: %+v", r.Status)
	}
}

// TestHealthz shows A7.2, A7.3 and A7.4: what depends on the node, and the
// bodies.
func TestHealthz(t *testing.T) {
	c := newFakeClock()
	s := New(Options{Logger: zerolog.Nop(), Now: c.now})
	h := s.handler()
	s.Queued()
	s.Applied()
	c.advance(10 * time.Second)
	const (
		before = "2026-01-02T03:04:05Z"
		at     = "2026-01-02T03:04:15Z"
		late   = "2026-01-02T03:05:15Z"
		status = `"status":{"IPv4":{"lastUpdated":"` + before + `","healthy":true},"IPv6":{"lastUpdated":"` + before + `","healthy":true}}}`
	)
	ask := func(rule, path string, code int, body string) {
		t.Helper()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		if w.Code != code || body != "" && w.Body.String() != body {
			t.Errorf("%s: %s gives %d %s, not %d %s", rule, path, w.Code, w.Body, code, body)
		}
		check.Equalf(t, w.Header().Get("Content-Type"), "application/json", "%s: %s has the type", rule, path)
		check.Equalf(t, w.Header().Get("X-Content-Type-Options"), "nosniff", "%s: %s has the options", rule, path)
		if !json.Valid(w.Body.Bytes()) {
			t.Errorf("%s: %s is no JSON: %s", rule, path, w.Body)
		}
	}
	ask("A7.3 no node", "/healthz", 503, `{"lastUpdated":"`+before+`","currentTime":"`+at+`","nodeEligible":false,"healthy":true,`+status)
	ask("A7.2 no node", "/livez", 200, `{"lastUpdated":"`+at+`","currentTime":"`+at+`","healthy":true,`+status)
	s.state.SetNode(&service.Node{Found: true})
	ask("A7.4", "/healthz", 200, `{"lastUpdated":"`+at+`","currentTime":"`+at+`","nodeEligible":true,"healthy":true,`+status)
	s.state.SetNode(&service.Node{Found: true, BeingDeleted: true})
	ask("A7.3 the node leaves", "/healthz", 503, "")
	ask("A7.2 the node leaves", "/livez", 200, "")
	s.state.SetNode(&service.Node{Found: true})
	s.Queued()
	c.advance(Timeout)
	ask("A7.4 late", "/livez", 503, `{"lastUpdated":"`+before+`","currentTime":"`+late+`","healthy":false,"status":{"IPv4":{"lastUpdated":"`+before+`","healthy":false},"IPv6":{"lastUpdated":"`+before+`","healthy":false}}}`)
	ask("A7.3 late", "/healthz", 503, "")
	// A7.5
	check.Equalf(t, s.Stats(), Stats{HealthzOK: 1, HealthzUnavailable: 3, LivezOK: 2, LivezUnavailable: 1}, "A7.5: counted")
}
