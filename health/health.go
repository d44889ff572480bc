package health

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/internal/httpport"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// healthzRetry is how often the address of /healthz is tried again (A7.7).
	healthzRetry = 5 * time.Second
	// portRetry is the same for the ports of Services (A6.6).
	portRetry = time.Second
)

// Options are what a Server works with. Only Logger is needed.
type Options struct {
	// Address is where /healthz and /livez are, such as "0.0.0.0:10256"; none
	// if it is empty.
	Address string
	Logger  zerolog.Logger
	// Event takes what becomes an event about a Service, or about this node if
	// the name is empty. Nil means that nobody wants to know. It must not wait.
	Event func(svc service.Name, reason, text string)
	// Now gives the time; nil stands for time.Now.
	Now func() time.Time
	// Sockets shares the sockets of health check ports out among namespaces; nil
	// means that there is no bound.
	Sockets Sockets
	// Listen opens a port; nil stands for a plain listening socket.
	Listen func(network, address string) (net.Listener, error)
	// Retry is when a port that could not be opened is tried again; 0 stands
	// for a second, and five seconds for Address.
	Retry time.Duration
}

// Sockets bounds the listening sockets of namespaces. It is safe for concurrent use.
type Sockets interface {
	// TakeSockets counts sockets that are about to be opened. The error says why they
	// must not be.
	TakeSockets(namespace string, sockets int) error
	// ReturnSockets says that so many are closed, or were not opened.
	ReturnSockets(namespace string, sockets int)
}

// unbounded are Sockets without a bound.
type unbounded struct{}

func (unbounded) TakeSockets(string, int) error { return nil }
func (unbounded) ReturnSockets(string, int)     {}

// Server answers health checks. Queued, Update and Applied are called from one
// goroutine; Stats may be called from any.
type Server struct {
	options Options
	state   *State
	proxy   *opener // nil without an address

	proxyConns httpport.Group // of /healthz and /livez
	portConns  httpport.Group // of the ports of all Services together

	mu     sync.Mutex
	ports  map[portKey]*port // guarded by mu, as is what follows
	timer  *time.Timer       // tries again; nil unless a port failed
	closed bool

	counts counts
}

type counts struct {
	healthzOK, healthzBad, livezOK, livezBad atomic.Uint64
	open, waiting                            atomic.Int64
	failures                                 atomic.Uint64
}

// Stats is what a Server has counted.
type Stats struct {
	// Healthz and Livez count answers with 200 and with 503 (A7.5).
	HealthzOK, HealthzUnavailable, LivezOK, LivezUnavailable uint64
	// Ports is the number of health check ports of Services that are open, of
	// both families, and PortFailures how often one could not be opened.
	Ports        int
	PortFailures uint64
	// PortsWaiting is the number of those that wait for room: see Options.Sockets.
	PortsWaiting int
	// Evicted counts connections that were closed to make room for others.
	Evicted uint64
}

// New returns a Server that answers on Options.Address from now on, and on the
// ports of Services from the first Update.
func New(o Options) *Server {
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Event == nil {
		o.Event = func(service.Name, string, string) {}
	}
	if o.Sockets == nil {
		o.Sockets = unbounded{}
	}
	if o.Listen == nil {
		o.Listen = listen
	}
	s := &Server{options: o, state: NewState(Timeout, o.Now), ports: make(map[portKey]*port)}
	if o.Address != "" {
		s.proxy = &opener{server: s, http: httpport.New(&s.proxyConns, s.handler(), answerTime)}
		s.proxy.open()
	}
	return s
}

// listen opens a port. Multipath TCP is of no use for a health check.
func listen(network, address string) (net.Listener, error) {
	var c net.ListenConfig
	c.SetMultipathTCP(false)
	return c.Listen(context.Background(), network, address)
}

// Queued says that a change has come that is not in force yet.
func (s *Server) Queued() {
	s.state.Queued(service.IPv4)
	s.state.Queued(service.IPv6)
}

// Update says what there is now: the health check ports follow it, whether all
// of it is in force or not.
func (s *Server) Update(t *policy.Table) {
	s.state.SetNode(&t.Snapshot().Node)
	s.syncPorts(t)
}

// Applied says that all changes are in force.
func (s *Server) Applied() {
	s.state.Updated(service.IPv4)
	s.state.Updated(service.IPv6)
}

// Stats returns what was counted.
func (s *Server) Stats() Stats {
	return Stats{
		HealthzOK: s.counts.healthzOK.Load(), HealthzUnavailable: s.counts.healthzBad.Load(),
		LivezOK: s.counts.livezOK.Load(), LivezUnavailable: s.counts.livezBad.Load(),
		Ports: int(s.counts.open.Load()), PortFailures: s.counts.failures.Load(),
		PortsWaiting: int(s.counts.waiting.Load()),
		Evicted:      s.proxyConns.Evicted() + s.portConns.Evicted(),
	}
}

// Close closes all ports; requests under way are cut.
func (s *Server) Close() {
	if s.proxy != nil {
		s.proxy.close()
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

// handler answers /healthz and /livez, whatever the method.
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
	if err != nil { // a time that JSON cannot hold
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	writeHeader(w, ok)
	_, _ = w.Write(body) // the client may have gone; nobody to tell
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
