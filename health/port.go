package health

import (
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

// portKey names a health check port: each family has its own sockets and its
// own count (A6.6).
type portKey struct {
	service service.Name
	family  service.Family
}

// target is what a health check port must be.
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
	http      *httpport.Server // nil while it is not open
	listeners []net.Listener
	told      string // the error of the last attempt, without numbers that change
	named     bool   // the log has named it
}

var wildcard = [2]netip.Addr{service.IPv4: netip.IPv4Unspecified(), service.IPv6: netip.IPv6Unspecified()}

// targets returns the health check ports that there must be (A6.1). They are on
// the addresses that have node ports; the wildcard address if all have (A6.6).
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

// syncPorts opens and closes health check ports until they are what a table
// wants. A port that stays as it is keeps its sockets (A6.7).
func (s *Server) syncPorts(t *policy.Table) {
	want := targets(t)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	// All that goes is closed first: its number may be another's now.
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

// mostNamed is how many ports are named at once that there is no room for.
const mostNamed = 16

// noRoomError is why Options.Sockets does not allow a port.
type noRoomError struct{ error }

// noRoom is what port.told says of noRoomErrors.
const noRoom = "no room"

// openPortsLocked opens the ports that are not open, and sees to it that those
// that cannot be opened are tried again (A6.6).
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
		if errors.As(err, new(noRoomError)) {
			waiting++
			if p.told == noRoom {
				continue
			}
			if fresh++; fresh > mostNamed {
				p.told, p.named = noRoom, false
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
	wait := portRetry
	if s.options.Retry > 0 {
		wait = s.options.Retry
	}
	s.timer = time.AfterFunc(wait, func() {
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
		return noRoomError{fmt.Errorf("too many ports are held (%w): raise --max-claims or the limit of open files", err)}
	}
	network := [2]string{service.IPv4: "tcp4", service.IPv6: "tcp6"}[p.key.family]
	var listeners []net.Listener
	for _, a := range p.addresses {
		l, err := s.options.Listen(network, netip.AddrPortFrom(a, p.number).String())
		if err != nil {
			for _, open := range listeners {
				_ = open.Close() // nothing was accepted
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
		s.options.Logger.Info().Str("object", "Service "+p.key.service.String()).Uint16("port", p.number).Msg("the health check port is open at last")
	}
	p.told, p.named = "", false
	return nil
}

// servePort answers on one address of a port.
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

// reportPort logs once why a port is not open.
func (s *Server) reportPort(p *port, err error) {
	s.counts.failures.Add(1)
	text := err.Error()
	if errors.As(err, new(noRoomError)) {
		text = noRoom
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
	// The server closes only the sockets that it has begun to serve. Closing a
	// listening socket loses nothing.
	_ = p.http.Close()
	for _, l := range p.listeners {
		_ = l.Close()
	}
	p.http, p.listeners = nil, nil
	s.options.Sockets.ReturnSockets(p.key.service.Namespace, len(p.addresses))
	s.counts.open.Add(-1)
}

// portHandler answers health checks of one Service, whatever the path and the
// method (A6.2).
type portHandler struct {
	port  *port
	state *State
}

func (h *portHandler) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	n := h.port.endpoints.Load()
	healthy := h.state.Report().Healthy // whatever the node is (A6.8)
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.FormatInt(n, 10))
	writeHeader(w, n > 0 && healthy)
	name := h.port.key.service
	// The client may have gone; nobody to tell.
	_, _ = fmt.Fprintf(w, "{\n\t\"service\": {\n\t\t\"namespace\": %q,\n\t\t\"name\": %q\n\t},\n\t\"localEndpoints\": %d,\n\t\"serviceProxyHealthy\": %t\n}",
		name.Namespace, name.Name, n, healthy)
}
