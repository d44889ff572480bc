package health

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/internal/httpport"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// portKey identifies a health check port. Each family has its own sockets and its
// own count (A6.6).
type portKey struct {
	service service.Name
	family  service.Family
}

// target is the desired state of a health check port.
type target struct {
	number    uint16
	addresses []netip.Addr // sorted
	endpoints int          // A6.3
}

// port is a health check port of a Service.
type port struct {
	key       portKey
	number    uint16
	addresses []netip.Addr
	endpoints atomic.Int64
	http      *httpport.Server // nil while the port is closed
	listeners []net.Listener
	told      string // error of the last attempt, without variable numbers
	named     bool   // the failure was logged for this port
}

var wildcard = [2]netip.Addr{service.IPv4: netip.IPv4Unspecified(), service.IPv6: netip.IPv6Unspecified()}

// targets returns the health check ports of a table (A6.1). They are on the
// addresses that have node ports, or on the wildcard address if all have (A6.6).
func targets(t *policy.Table) map[portKey]target {
	var addresses [2][]netip.Addr
	for f := range addresses {
		addrs, all := t.NodePortAddresses(service.Family(f))
		if all {
			addrs = []netip.Addr{wildcard[f]}
		}
		addresses[f] = addrs
	}
	ready := make(map[portKey]map[netip.Addr]struct{})
	out := make(map[portKey]target)
	for p := range t.HealthChecked {
		for f := range p.Families {
			v := &p.Families[f]
			if !v.Exists || len(addresses[f]) == 0 {
				continue
			}
			k := portKey{p.Name.Name, service.Family(f)}
			if ready[k] == nil {
				ready[k] = make(map[netip.Addr]struct{})
			}
			for i := range v.Endpoints {
				if e := &v.Endpoints[i]; e.Local && e.Ready {
					ready[k][e.Addr.Addr()] = struct{}{}
				}
			}
			out[k] = target{p.HealthCheckNodePort, addresses[f], len(ready[k])}
		}
	}
	return out
}

// syncPorts opens and closes health check ports according to a table. An unchanged
// port keeps its sockets (A6.7).
func (s *Server) syncPorts(t *policy.Table) {
	want := targets(t)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	// Close ports first: another Service may have the same number now.
	for k, p := range s.ports {
		if w, ok := want[k]; !ok || w.number != p.number || !slices.Equal(w.addresses, p.addresses) {
			s.closePortLocked(p)
			delete(s.ports, k)
		}
	}
	for k, w := range want {
		p := s.ports[k]
		if p == nil {
			p = &port{key: k, number: w.number, addresses: w.addresses}
			s.ports[k] = p
		}
		p.endpoints.Store(int64(w.endpoints))
	}
	s.openPortsLocked()
}

// mostNamed bounds the log lines about ports over the limit in one pass.
const mostNamed = 16

// overLimitError is the error of Options.Sockets for a port.
type overLimitError struct{ error }

// overLimit is port.told after an overLimitError.
const overLimit = "over the limit"

// openPortsLocked tries to open all closed ports, and schedules another attempt if
// one failed (A6.6).
func (s *Server) openPortsLocked() {
	failed := false
	waiting, fresh := 0, 0
	for _, p := range s.ports {
		if p.http != nil {
			continue
		}
		err := s.openPortLocked(p)
		if err == nil {
			continue
		}
		failed = true
		if errors.As(err, new(overLimitError)) {
			waiting++
			if p.told == overLimit {
				continue
			}
			if fresh++; fresh > mostNamed {
				p.told, p.named = overLimit, false
				continue
			}
		}
		s.reportPort(p, err)
	}
	s.counts.waiting.Store(int64(waiting))
	if fresh > mostNamed {
		s.options.Logger.Warn().Msgf("%d more health check ports cannot be opened for want of room", fresh-mostNamed)
	}
	if s.timer != nil {
		s.timer.Stop()
		s.timer = nil
	}
	if !failed {
		return
	}
	s.timer = time.AfterFunc(cmp.Or(s.options.Retry, portRetry), func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.closed {
			s.openPortsLocked()
		}
	})
}

// openPortLocked opens a port on all its addresses, or on none.
func (s *Server) openPortLocked(p *port) error {
	namespace := p.key.service.Namespace
	if err := s.options.Sockets.TakeSockets(namespace, len(p.addresses)); err != nil {
		return overLimitError{fmt.Errorf("too many ports are held (%w): raise --max-claims or the limit of open files", err)}
	}
	network := [2]string{service.IPv4: "tcp4", service.IPv6: "tcp6"}[p.key.family]
	var listeners []net.Listener
	for _, a := range p.addresses {
		l, err := s.options.Listen(network, netip.AddrPortFrom(a, p.number).String())
		if err != nil {
			for _, open := range listeners {
				_ = open.Close() // it has accepted no connection
			}
			s.options.Sockets.ReturnSockets(namespace, len(p.addresses))
			return err
		}
		listeners = append(listeners, l)
	}
	p.http, p.listeners = httpport.New(&s.portConns, &portHandler{p, s.state}, answerTime), listeners
	for _, l := range listeners {
		go s.servePort(p, p.http, l)
	}
	s.counts.open.Add(1)
	if p.named {
		s.options.Logger.Info().Str("object", "Service "+p.key.service.String()).Uint16("port", p.number).Msg("the health check port is open now")
	}
	p.told, p.named = "", false
	return nil
}

// servePort serves one address of a port. It runs on its own goroutine.
func (s *Server) servePort(p *port, server *httpport.Server, l net.Listener) {
	err := server.Serve(l)
	if errors.Is(err, http.ErrServerClosed) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if p.http != server || s.closed {
		return
	}
	s.closePortLocked(p)
	s.reportPort(p, err)
	s.openPortsLocked()
}

// reportPort logs a failure to open a port once, and records an event.
func (s *Server) reportPort(p *port, err error) {
	s.counts.failures.Add(1)
	text := err.Error()
	if errors.As(err, new(overLimitError)) {
		text = overLimit
	}
	if text != p.told {
		p.told, p.named = text, true
		s.options.Logger.Warn().Str("object", "Service "+p.key.service.String()).Str("event", "FailedToStartServiceHealthcheck").
			Err(err).Msg(fmt.Sprintf("health check port %d cannot be opened; trying again", p.number))
		s.options.Event(p.key.service, "FailedToStartServiceHealthcheck", fmt.Sprintf("health check port %d cannot be opened: %v", p.number, err))
	}
}

func (s *Server) closePortLocked(p *port) {
	if p.http == nil {
		return
	}
	for _, l := range p.listeners { // the server closes only those on which Serve has started
		_ = l.Close()
	}
	p.http.Leave()
	s.ending.Go(p.http.End)
	p.http, p.listeners = nil, nil
	s.options.Sockets.ReturnSockets(p.key.service.Namespace, len(p.addresses))
	s.counts.open.Add(-1)
}

// portHandler answers health checks of one Service, for all paths and methods
// (A6.2).
type portHandler struct {
	port  *port
	state *State
}

func (h *portHandler) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	n := h.port.endpoints.Load()
	healthy := h.state.Report().Healthy // independent of the node's eligibility (A6.8)
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.FormatInt(n, 10))
	writeHeader(w, n > 0 && healthy)
	name := h.port.key.service
	// Ignore the error: the client has closed the connection.
	_, _ = fmt.Fprintf(w, "{\n\t\"service\": {\n\t\t\"namespace\": %q,\n\t\t\"name\": %q\n\t},\n\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": %t\n}",
		name.Namespace, name.Name, n, healthy)
}
