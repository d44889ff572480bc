package admin

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/pprof"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/sluice-proxy/sluice/internal/httpport"
)

// Server serves /metrics, /healthz and the other pages of kube-proxy's port 10249
// over HTTP.
type Server struct {
	listener net.Listener
	server   *httpport.Server
}

// Pages is the content that a Server serves.
type Pages struct {
	// Metrics are served at /metrics.
	Metrics prometheus.Gatherer
	// Mode is the text of /proxyMode.
	Mode string
	// Config is served at /configz as JSON, under the name of kube-proxy's API
	// group. If it is nil, there is no such page.
	Config any
	// Flags are served at /flagz, by name.
	Flags map[string]string
	// Version is the program's version.
	Version string
	// Profiling adds /debug/pprof. Profiles can slow the program down.
	Profiling bool
	// Connections bounds and counts the clients' connections; nil means a Group of
	// the Server's own.
	Connections *httpport.Group
}

// Listen listens on an address, such as "127.0.0.1:10249". The server answers while
// Serve runs.
func Listen(address string, pages Pages) (*Server, error) {
	l, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("metrics address %s: %w", address, err)
	}
	connections := pages.Connections
	if connections == nil {
		connections = new(httpport.Group)
	}
	return &Server{
		listener: l,
		server:   httpport.New(connections, pages.handler(time.Now()), 2*time.Minute), // a profile takes 30 s
	}, nil
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
	health := newSLIs(started)
	if p.Config != nil {
		handle("/configz", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			writeJSON(w, map[string]any{"kubeproxy.config.k8s.io": p.Config})
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
	handle("/metrics", promhttp.HandlerFor(p.Metrics, options))
	handle("/metrics/slis", promhttp.HandlerFor(health.all, options))
	handle("/proxyMode", text(p.Mode))
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

// Addr returns the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Serve serves requests until ctx ends, then waits up to a second for running
// requests. It returns an error if the listening socket fails.
func (s *Server) Serve(ctx context.Context) error {
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := s.server.Shutdown(grace); err != nil {
			_ = s.server.Close() // aborts the remaining requests
		}
	})
	err := s.server.Serve(s.listener)
	if stop() { // ctx has not ended, so the server failed
		return fmt.Errorf("metrics address %s: %w", s.Addr(), err)
	}
	<-stopped
	if !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("metrics address %s: %w", s.Addr(), err)
	}
	return nil
}
