package health

import (
	"cmp"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/internal/httpport"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// healthzRetry is the time between attempts to listen on the address of
	// /healthz (A7.7).
	healthzRetry = 5 * time.Second
	// portRetry is the time between attempts to open a health check port (A6.6).
	portRetry = time.Second
	// answerTime bounds how long a client may take to read an answer.
	answerTime = 10 * time.Second
)

// Options configure a Server. Logger, Event and Sockets are required.
type Options struct {
	// Address is the address of /healthz and /livez, such as "0.0.0.0:10256". If it
	// is empty, they are not served.
	Address string
	Logger  zerolog.Logger
	// Event records a Kubernetes event about a Service, or about this node if svc
	// is empty. It must not block.
	Event func(svc service.Name, reason, text string)
	// Now returns the time; nil means time.Now.
	Now func() time.Time
	// Sockets bounds the sockets of health check ports by namespace.
	Sockets Sockets
	// Listen opens a listening socket; nil means a plain one.
	Listen func(network, address string) (net.Listener, error)
	// Retry is the time between attempts to open a port; 0 means a second, and five
	// seconds for Address.
	Retry time.Duration
}

// Sockets bounds the listening sockets of namespaces. It is safe for concurrent use.
type Sockets interface {
	// TakeSockets reserves sockets before they are opened. It returns an error if
	// the bound does not allow them.
	TakeSockets(namespace string, sockets int) error
	// ReturnSockets returns reserved sockets after they were closed, or were not
	// opened.
	ReturnSockets(namespace string, sockets int)
}

// Server answers health checks. Queued, Update and Applied must be called from one
// goroutine. Stats is safe for concurrent use.
type Server struct {
	options Options
	state   *State
	end     func()         // ends /healthz and /livez; nil without an address
	ending  sync.WaitGroup // servers that answer their last requests

	proxyConns httpport.Group // connections to /healthz and /livez
	portConns  httpport.Group // connections to the ports of all Services

	mu     sync.Mutex
	ports  map[portKey]*port // guarded by mu, like the following fields
	timer  *time.Timer       // next attempt; nil unless a port failed
	closed bool

	counts counts
}

type counts struct {
	healthzOK, healthzBad, livezOK, livezBad atomic.Uint64
	open, waiting                            atomic.Int64
	failures                                 atomic.Uint64
}

// Stats are the counts of a Server.
type Stats struct {
	// Answers of /healthz and /livez with status 200 and 503 (A7.5).
	HealthzOK, HealthzUnavailable, LivezOK, LivezUnavailable uint64
	// Ports is the number of open health check ports, of both families.
	// PortFailures counts failed attempts to open one.
	Ports        int
	PortFailures uint64
	// PortsWaiting is the number of ports that Options.Sockets does not allow at
	// present.
	PortsWaiting int
	// Evicted counts connections that were closed in favour of new ones.
	Evicted uint64
}

// New creates a Server. It starts to serve Options.Address at once, and the ports
// of Services with the first Update.
func New(o Options) *Server {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Listen == nil {
		o.Listen = listen
	}
	s := &Server{options: o, state: NewState(Timeout, o.Now), ports: make(map[portKey]*port)}
	if o.Address != "" {
		s.end = s.openProxy()
	}
	return s
}

// listen opens a plain TCP socket. Health checks do not need Multipath TCP.
func listen(network, address string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	return c.Listen(context.Background(), network, address)
}

// Queued records a change that is not in force yet.
func (s *Server) Queued() {
	s.state.Queued(service.IPv4)
	s.state.Queued(service.IPv6)
}

// Update opens and closes health check ports according to a table, which need not
// be in force yet.
func (s *Server) Update(t *policy.Table) {
	s.state.SetNode(&t.Snapshot().Node)
	s.syncPorts(t)
}

// Applied records that all changes are in force.
func (s *Server) Applied() {
	s.state.Updated(service.IPv4)
	s.state.Updated(service.IPv6)
}

// Stats returns the counts.
func (s *Server) Stats() Stats {
	return Stats{
		HealthzOK: s.counts.healthzOK.Load(), HealthzUnavailable: s.counts.healthzBad.Load(),
		LivezOK: s.counts.livezOK.Load(), LivezUnavailable: s.counts.livezBad.Load(),
		Ports: int(s.counts.open.Load()), PortFailures: s.counts.failures.Load(),
		PortsWaiting: int(s.counts.waiting.Load()),
		Evicted:      s.proxyConns.Evicted() + s.portConns.Evicted(),
	}
}

// Close closes all ports. What has been accepted is answered; see Wait.
func (s *Server) Close() {
	if s.end != nil {
		s.end()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.timer != nil {
		s.timer.Stop()
	}
	for _, p := range s.ports {
		s.closePortLocked(p)
	}
}

// Wait waits after Close until all requests are answered, for httpport.Grace at most.
func (s *Server) Wait() { s.ending.Wait() }

// openProxy serves /healthz and /livez, and retries until that succeeds (A7.7). It
// returns a function that ends it.
func (s *Server) openProxy() (end func()) {
	o := &s.options
	var failing once.Trouble
	told := func(err error) {
		switch {
		case err == nil && failing.Over():
			o.Logger.Info().Str("address", o.Address).Msg("/healthz is served now")
		case err != nil && failing.New(err.Error()):
			o.Logger.Error().Err(err).Str("event", "FailedToStartProxierHealthcheck").Msg("/healthz and /livez are not served; trying again")
			o.Event(service.Name{}, "FailedToStartProxierHealthcheck", err.Error())
		}
	}
	listen := func() (net.Listener, error) { return o.Listen("tcp", o.Address) }
	ctx, cancel := context.WithCancel(context.Background())
	server := httpport.New(&s.proxyConns, s.handler(), answerTime)
	s.ending.Go(func() { server.Keep(ctx, nil, listen, cmp.Or(o.Retry, healthzRetry), told) })
	return func() {
		cancel()
		server.Leave()
	}
}

// handler answers /healthz and /livez for all HTTP methods.
func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		report, ok := s.state.Healthz()
		count(ok, &s.counts.healthzOK, &s.counts.healthzBad)
		writeReport(w, report, ok)
	})
	mux.HandleFunc("/livez", func(w http.ResponseWriter, _ *http.Request) {
		report, ok := s.state.Livez()
		count(ok, &s.counts.livezOK, &s.counts.livezBad)
		writeReport(w, report, ok)
	})
	return mux
}

func count(ok bool, good, bad *atomic.Uint64) {
	if ok {
		good.Add(1)
	} else {
		bad.Add(1)
	}
}

func writeReport(w http.ResponseWriter, r Report, ok bool) {
	body, err := json.Marshal(r)
	if err != nil { // the time does not fit into JSON
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	writeHeader(w, ok)
	_, _ = w.Write(body) // ignore the error: the client has closed the connection
}

func writeHeader(w http.ResponseWriter, ok bool) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if ok {
		w.WriteHeader(http.StatusOK)
	} else {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
}
