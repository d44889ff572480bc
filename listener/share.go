package listener

import (
	"fmt"
	"sync"

	"github.com/sluice-proxy/sluice/service"
)

// shares count the sockets of claims and of health check node ports by namespace, so
// that no tenant takes all. Cluster IPs, which have such sockets where each destination
// is bound, do not count: no tenant has more of them than the API gives it.
type shares struct {
	mu         sync.Mutex // guards what follows, and changes of stats.claims
	namespaces map[string]int64
	external   int64 // for external IPs
}

// holding is what one claim, or one health check node port, counts as.
type holding struct {
	namespace string
	kind      service.AddressKind
	sockets   int64
}

// holding gives what a claim holds now.
func (m *Manager) holding(c *claim) holding {
	if c.socket == nil {
		return holding{}
	}
	return holding{c.outlet.name.Namespace, c.outlet.kind, m.socketsOf(c)}
}

// socketsOf gives how many sockets a claim needs.
func (m *Manager) socketsOf(c *claim) int64 {
	if c.outlet.dst.Protocol == service.UDP {
		return int64(len(m.workers))
	}
	return 1
}

// account brings the shares up to date with a claim.
func (m *Manager) account(c *claim) {
	was, is := c.counted, m.holding(c)
	if was == is {
		return
	}
	c.counted = is
	s := &m.claims.shares
	s.mu.Lock()
	defer s.mu.Unlock()
	m.stats.claims.Add(is.sockets - was.sockets)
	s.addLocked(was, -1)
	s.addLocked(is, 1)
}

// TakeSockets counts sockets that a namespace is about to open beside claims, such as
// those of a health check node port. The error says why it may not open them.
// Like ReturnSockets, it may be called from any goroutine.
func (m *Manager) TakeSockets(namespace string, sockets int) error {
	h := holding{namespace, service.NodePort, int64(sockets)}
	s := &m.claims.shares
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := m.allowsLocked(h); err != nil {
		return err
	}
	m.stats.claims.Add(h.sockets)
	s.addLocked(h, 1)
	m.setLimitLocked()
	return nil
}

// ReturnSockets says that sockets are closed that TakeSockets has counted.
func (m *Manager) ReturnSockets(namespace string, sockets int) {
	h := holding{namespace, service.NodePort, int64(sockets)}
	s := &m.claims.shares
	s.mu.Lock()
	defer s.mu.Unlock()
	m.stats.claims.Add(-h.sockets)
	s.addLocked(h, -1)
	m.setLimitLocked()
}

func (s *shares) addLocked(h holding, sign int64) {
	if h.kind == service.ClusterIP || h.sockets == 0 {
		return
	}
	if s.namespaces[h.namespace] += sign * h.sockets; s.namespaces[h.namespace] == 0 {
		delete(s.namespaces, h.namespace)
	}
	if h.kind == service.ExternalIP {
		s.external += sign * h.sockets
	}
}

// externalShare is the part of all claims that external IPs may have: one in so
// many. The rest is for node ports, which the API server hands out.
const externalShare = 4

// allows tells why a claim may have no sockets, or nil.
func (m *Manager) allows(c *claim) error {
	m.claims.shares.mu.Lock()
	defer m.claims.shares.mu.Unlock()
	return m.allowsLocked(holding{c.outlet.name.Namespace, c.outlet.kind, m.socketsOf(c)})
}

// allowsLocked tells why there may be no more sockets of a kind, or nil. A namespace
// may hold no more than are free afterwards: alone half of all, beside one that holds
// that many a quarter, and so on, so that there is always room for another one.
func (m *Manager) allowsLocked(h holding) error {
	most, held, need := int64(m.config.MaxClaims), m.stats.claims.Load(), h.sockets
	if held >= most {
		return fmt.Errorf("there are %d already", most)
	}
	if m.config.Descriptors > 0 {
		// Connections that are open are not closed for a port, and must not be all
		// that are possible then: others would wait for their end.
		limit, open := m.limitBeside(held+need), m.open.Load()
		if open > limit-limit/64 {
			return fmt.Errorf("%d connections hold the descriptors", open)
		}
	}
	if h.kind == service.ClusterIP {
		return nil
	}
	s := &m.claims.shares
	if has := s.namespaces[h.namespace]; has > 0 && has+need > most-held-need {
		return fmt.Errorf("namespace %s holds %d of %d, and may hold no more than are free", h.namespace, has, most)
	}
	if h.kind == service.ExternalIP && s.external > 0 && s.external+need > most/externalShare {
		return fmt.Errorf("external IPs hold %d of %d, which is their share", s.external, most)
	}
	return nil
}
