// Package serve answers the requests of the admin API (package api) from a
// live.View. It knows neither sockets nor who asks: the same handler serves the
// admin socket and, read-only, the web page.
package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/filter"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// Options are what the answers are made from.
type Options struct {
	View    *live.View
	History *live.History
	// Past keeps the records of connections that ended; nil if none are kept.
	Past *conntrack.Past
	// TCP is set if records have Record.Transport.
	TCP bool
	// Version is the answer of api.PathVersion; Actions is set for each client.
	Version api.Version
	// Policy returns the policy in force. It is called from any goroutine.
	Policy func() *policy.Table
	// PodAt returns the name of a pod by its address, also if it serves nothing; the zero one if
	// none is known. It is called from any goroutine, and may be nil.
	PodAt func(netip.Addr) service.Name
	// Pods returns the pods that PodAt knows. It is called from any goroutine, and may be nil.
	Pods func() []service.Name
	// Choosing returns what new connections to a service port meet. It is called from any
	// goroutine.
	Choosing func(*service.Port) live.Choosing
	// Status, Config and Explain answer api.PathStatus, PathConfig and PathExplain.
	Status  func(context.Context) (*api.Status, error)
	Config  func() map[string]string
	Explain func(protocol, from, to string, text bool) (any, error)
	// Destinations visits what the steering plan names.
	Destinations func(ctx context.Context, visit func(d service.Destination, steering string)) error
	// Drains holds what is drained.
	Drains *Drains
	// SetVerbosity changes the verbosity of the program's log for a time.
	SetVerbosity func(v int, duration time.Duration)
	// Log is told of each action.
	Log zerolog.Logger
	// MayAct reports whether the client of a request may do more than read.
	MayAct func(*http.Request) bool
}

// Handler serves the API. Create it with New.
type Handler struct {
	options     Options
	mux         *http.ServeMux
	pastReaders chan struct{} // has an element for each
	pods        pods
}

// New returns a Handler.
func New(o Options) *Handler {
	h := &Handler{options: o, mux: http.NewServeMux(), pastReaders: make(chan struct{}, maxPastReaders)}
	h.pods.named = o.PodAt
	h.pods.snapshot = func() *service.Snapshot { return o.Policy().Snapshot() }
	h.get(api.PathVersion, h.version)
	h.get(api.PathConnections, h.connections, "filter", "sort", "offset", "limit", "transport")
	h.get(api.PathConnection, h.connection)
	h.stream(api.PathStream, h.allConnections, "filter", "transport")
	h.stream(api.PathTap, h.tap, "filter", "opens", "rate")
	h.stream(api.PathPast, h.past, "filter", "since", "limit")
	h.get(api.PathServices, h.services, "filter", "search", "service", "offset", "limit")
	h.stream(api.PathRates, h.rates, "filter", "by", "sort", "limit", "interval", "quiet")
	h.get(api.PathHistory, h.history, "by", "service", "endpoint", "since", "sort", "limit")
	h.get(api.PathFailures, h.failures, "limit", "service", "endpoint")
	h.get(api.PathStatus, h.status)
	h.get(api.PathConfig, h.config)
	h.get(api.PathExplain, h.explain, "protocol", "from", "to", "text")
	h.get(api.PathDestinations, h.destinations, "search", "steering", "offset", "limit")
	h.get(api.PathComplete, h.complete, "filter", "at")
	h.get(api.PathDrain, h.drained)
	act(h, api.PathDrain, h.drain)
	act(h, api.PathClose, h.end)
	act(h, api.PathVerbosity, h.verbosity)
	return h
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if _, pattern := h.mux.Handler(r); pattern == "" {
		// Answers as JSON also where nothing is served, or not with this method.
		probe := &statusProbe{header: make(http.Header), status: http.StatusNotFound}
		h.mux.ServeHTTP(probe, r)
		fail(w, &requestError{probe.status, fmt.Errorf("%s %s: no such request; docs/admin-api.md lists them", r.Method, r.URL.Path)})
		return
	}
	h.mux.ServeHTTP(w, r)
}

// statusProbe keeps the status of an answer.
type statusProbe struct {
	header http.Header
	status int
}

func (p *statusProbe) Header() http.Header         { return p.header }
func (p *statusProbe) Write(b []byte) (int, error) { return len(b), nil }
func (p *statusProbe) WriteHeader(status int)      { p.status = status }

// requestError is an error with the status that it is answered with.
type requestError struct {
	status int
	err    error
}

func (e *requestError) Error() string { return e.err.Error() }
func (e *requestError) Unwrap() error { return e.err }

func wrong(format string, args ...any) error {
	return &requestError{http.StatusBadRequest, fmt.Errorf(format, args...)}
}

// get serves one JSON object, for a request with some of the allowed parameters.
func (h *Handler) get(path string, f func(*http.Request, *params) (any, error), allowed ...string) {
	h.mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), answerTime)
		defer cancel()
		q := readParams(r, allowed)
		q.pods = &h.pods
		if q.err != nil {
			fail(w, q.err)
			return
		}
		answer, err := f(r.WithContext(ctx), q)
		reply(w, answer, err)
	})
}

// reply answers with an object, or with an error.
func reply(w http.ResponseWriter, answer any, err error) {
	if err != nil {
		fail(w, err)
		return
	}
	writeJSON(w, http.StatusOK, answer)
}

// answerTime bounds how long an answer takes that is not a stream.
const answerTime = 30 * time.Second

func writeJSON(w http.ResponseWriter, status int, answer any) {
	body, err := json.Marshal(answer)
	if err != nil {
		status, body = http.StatusInternalServerError, []byte(`{"error":"the answer cannot be written"}`)
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("Cache-Control", "no-store")
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(answerTime)) // not supported in tests
	w.WriteHeader(status)
	_, _ = w.Write(append(printable.JSON(body), '\n')) // ignore the error: the client has closed the connection
}

// fail answers with an error.
func fail(w http.ResponseWriter, err error) {
	status := http.StatusInternalServerError
	answer := api.Error{Error: err.Error()}
	var request *requestError
	var place *filter.Error
	switch {
	case errors.As(err, &place):
		status = http.StatusBadRequest
		answer.Filter, answer.At, answer.End = place.Filter, place.At, place.End
	case errors.As(err, &request):
		status = request.status
	case errors.Is(err, conntrack.ErrTooManyTaps), errors.Is(err, live.ErrTooManyMeters):
		status = http.StatusTooManyRequests
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		status = http.StatusServiceUnavailable
	}
	writeJSON(w, status, answer)
}

func (h *Handler) version(r *http.Request, _ *params) (any, error) {
	v := h.versionFor(r)
	return &v, nil
}

// versionFor returns the version as the client of a request is told.
func (h *Handler) versionFor(r *http.Request) api.Version {
	v := h.options.Version
	v.Actions = h.mayAct(r)
	return v
}

// mayAct reports whether a request may do more than read.
func (h *Handler) mayAct(r *http.Request) bool {
	return r.Header.Get(api.ReadOnly) == "" && h.options.MayAct(r)
}

// status answers with the state of the proxy.
func (h *Handler) status(r *http.Request, _ *params) (any, error) {
	status, err := h.options.Status(r.Context())
	if err != nil {
		return nil, err
	}
	status.Version = h.versionFor(r)
	if status.Drained, err = h.drainedNow(r.Context()); err != nil {
		return nil, err
	}
	return status, nil
}

// config answers with the flags in force.
func (h *Handler) config(*http.Request, *params) (any, error) {
	return &api.Config{Flags: h.options.Config()}, nil
}

// explain answers what happens to a connection, by the policy in force.
func (h *Handler) explain(_ *http.Request, q *params) (any, error) {
	text := q.truth("text")
	if q.err != nil {
		return nil, q.err
	}
	answer, err := h.options.Explain(q.Get("protocol"), q.Get("from"), q.Get("to"), text)
	if err != nil {
		return nil, wrong("%w", err)
	}
	return answer, nil
}
