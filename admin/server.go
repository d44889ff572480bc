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

// Server serves /metrics, /healthz and what else kube-proxy has on its port
// 10249 over HTTP, off the data path.
type Server struct {
	listener net.Listener
	server   *httpport.Server
}

// Pages are what a Server shows.
type Pages struct {
	// Metrics are at /metrics.
	Metrics prometheus.Gatherer
	// Mode is the text at /proxyMode.
	Mode string
	// Config is what /configz shows as JSON, under the name of kube-proxy's API
	// group. Nothing if it is nil.
	Config any
	// Flags are what /flagz shows, by their names.
	Flags map[string]string
	// Version is the program's.
	Version string
	// Profiling adds /debug/pprof, which can slow the program down.
	Profiling bool
	// Connections bounds and counts the clients' connections; nil stands for a
	// Group of the Server's own.
	Connections *httpport.Group
}

// Listen opens the address, such as "127.0.0.1:10249". The server answers once
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

// handler answers for all pages.
func (p *Pages) handler(started time.Time) http.Handler {
	mux := http.NewServeMux()
	var paths []string // for statusz
	handle := func(path string, h http.Handler) {
		mux.Handle("GET "+path, h)
		paths = append(paths, path)
	}
	// One scrape that breaks (a value that cannot be had) must not hide all
	// others.
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

// text answers with a text.
func text(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("X-Content-Type-Options", "nosniff")
		_, _ = w.Write([]byte(body)) // the client may have gone; nobody to tell
	}
}

// Addr returns the address that the server listens on.
func (s *Server) Addr() net.Addr { return s.listener.Addr() }

// Serve answers until ctx ends, then lets requests finish for up to a second.
func (s *Server) Serve(ctx context.Context) error {
	stopped := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(stopped)
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if err := s.server.Shutdown(grace); err != nil {
			_ = s.server.Close() // the requests that did not finish are cut
		}
	})
	err := s.server.Serve(s.listener)
	if stop() { // ctx has not ended: Serve broke
		return fmt.Errorf("metrics address %s: %w", s.Addr(), err)
	}
	<-stopped
	if !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("metrics address %s: %w", s.Addr(), err)
	}
	return nil
}
