package listener

import (
	"fmt"

	"github.com/sluice-proxy/sluice/service"
)

// shares say who holds how many of the sockets of claims, so that no tenant takes
// all. Cluster IPs, which have such sockets where each destination is bound, do
// not count: no tenant has more of them than the API gives it.
type shares struct {
	namespaces map[string]int64
	external   int64 // for external IPs
}

// holding is what one claim counts as.
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
	m.stats.claims.Add(is.sockets - was.sockets)
	m.claims.shares.add(was, -1)
	m.claims.shares.add(is, 1)
}

func (s *shares) add(h holding, sign int64) {
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

// allows tells why a claim may have no sockets, or nil. A namespace may hold no
// more than are free afterwards: alone half of all, beside one that holds that
// many a quarter, and so on, so that there is always room for another one.
func (m *Manager) allows(c *claim) error {
	most, held, need := int64(m.config.MaxClaims), m.stats.claims.Load(), m.socketsOf(c)
	if held >= most {
		return fmt.Errorf("there are %d already", most)
	}
	o, s := c.outlet, &m.claims.shares
	if o.kind == service.ClusterIP {
		return nil
	}
	if has := s.namespaces[o.name.Namespace]; has > 0 && has+need > most-held-need {
		return fmt.Errorf("namespace %s holds %d of %d, and may hold no more than are free", o.name.Namespace, has, most)
	}
	if o.kind == service.ExternalIP && s.external > 0 && s.external+need > most/externalShare {
		return fmt.Errorf("external IPs hold %d of %d, which is their share", s.external, most)
	}
	return nil
}
