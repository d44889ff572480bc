package admin

import (
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sluice-proxy/sluice/internal/httpport"
)

// Pages are /metrics, /healthz and the other pages of kube-proxy's port 10249.
type Pages struct {
	// Metrics are served at /metrics.
	Metrics prometheus.Gatherer
	// Mode returns the text of /proxyMode.
	Mode func() string
	// Config returns what is served at /configz as JSON, under the name of
	// kube-proxy's API group. If it is nil, there is no such page.
	Config func() any
	// Flags returns what is served at /flagz, by name. If it is nil, there is no such page.
	Flags func() map[string]string
	// Version is the program's version.
	Version string
	// Profiling adds /debug/pprof. Profiles can slow the program down.
	Profiling bool
}

// Listen listens on an address, such as "127.0.0.1:10249".
func Listen(address string, listen func(network, address string) (net.Listener, error)) (net.Listener, error) {
	l, err := listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("metrics address %s: %w", address, err)
	}
	return l, nil
}

// NewServer returns a server of the pages; connections bounds and counts its clients'.
func NewServer(pages Pages, connections *httpport.Group) *httpport.Server {
	return httpport.New(connections, pages.handler(time.Now()), 2*time.Minute) // a profile takes 30 s
}

// handler serves all pages.
func (p *Pages) handler(started time.Time) http.Handler {
	mux := http.NewServeMux()
	var paths []string // for statusz
	handle := func(path string, h http.Handler) {
		mux.Handle("GET "+path, h)
		paths = append(paths, path)
	}
	// One failing collector must not hide all others.
	options := promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: 4, Timeout: 10 * time.Second}
	exemplars := options
	exemplars.EnableOpenMetrics = true // the only text that has them
	health := newSLIs(started)
	if p.Config != nil {
		handle("/configz", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			writeJSON(w, map[string]any{"kubeproxy.config.k8s.io": p.Config()})
		}))
	}
	if p.Profiling {
		for path, f := range map[string]http.HandlerFunc{
			"": pprof.Index, "cmdline": pprof.Cmdline, "profile": pprof.Profile, "symbol": pprof.Symbol, "trace": pprof.Trace,
		} {
			mux.HandleFunc("/debug/pprof/"+path, f)
		}
		paths = append(paths, "/debug/pprof/")
	}
	if p.Flags != nil {
		handle("/flagz", flagz(p.Flags))
	}
	handle("/healthz", health.observe(text("ok")))
	handle("/metrics", promhttp.HandlerFor(p.Metrics, exemplars))
	handle("/metrics/slis", promhttp.HandlerFor(health.all, options))
	handle("/proxyMode", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { text(p.Mode())(w, r) }))
	mux.Handle("GET /statusz", statusz(p.Version, started, append(paths, "/statusz")))
	return mux
}

// text serves a fixed text.
func text(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write([]byte(body)) // ignore the error: the client has closed the connection
	}
}
