package listener

import (
	"fmt"
	"sync"

	"github.com/sluice-proxy/sluice/service"
)

// quotas count the sockets of bound ports and of health check node ports by namespace,
// so that no tenant takes all. Cluster IPs, which have bound ports where each
// destination is bound, do not count: no tenant has more of them than the API gives it.
// They are safe for concurrent use.
type quotas struct {
	max         int64
	descriptors Descriptors // may be nil

	mu         sync.Mutex       // guards what follows
	sockets    int64            // in all
	namespaces map[string]int64 // of them
	external   int64            // of them, for external IPs
}

// holding is what one bound port, or one health check node port, counts as.
type holding struct {
	namespace string
	kind      service.AddressKind
	sockets   int64
}

// holding returns what a bound port needs.
func (m *Manager) holding(p *boundPort) holding {
	return holding{p.Name.Namespace, p.Kind, int64(m.protocols[p.Protocol].SocketsPerPort)}
}

// account updates the quotas after a bound port was opened, changed or closed.
func (m *Manager) account(p *boundPort) {
	was, is := p.counted, holding{}
	if p.open {
		is = m.holding(p)
	}
	if was == is {
		return
	}
	p.counted = is
	q := &m.bound.quotas
	q.mu.Lock()
	defer q.mu.Unlock()
	q.addLocked(was, -1)
	q.addLocked(is, 1)
}

// TakeSockets counts sockets that a namespace is about to open beside bound ports, such
// as those of a health check node port. The error says why it may not open them. Like
// ReturnSockets, it may be called from any goroutine.
func (m *Manager) TakeSockets(namespace string, sockets int) error {
	q, h := &m.bound.quotas, holding{namespace, service.NodePort, int64(sockets)}
	q.mu.Lock()
	defer q.mu.Unlock()
	if err := q.allowedLocked(h); err != nil {
		return err
	}
	q.addLocked(h, 1)
	return nil
}

// ReturnSockets says that sockets are closed that TakeSockets has counted.
func (m *Manager) ReturnSockets(namespace string, sockets int) {
	q := &m.bound.quotas
	q.mu.Lock()
	defer q.mu.Unlock()
	q.addLocked(holding{namespace, service.NodePort, int64(sockets)}, -1)
}

func (q *quotas) addLocked(h holding, sign int64) {
	if q.sockets += sign * h.sockets; q.descriptors != nil {
		q.descriptors.HoldBack(q.sockets)
	}
	if h.kind == service.ClusterIP || h.sockets == 0 {
		return
	}
	if q.namespaces[h.namespace] += sign * h.sockets; q.namespaces[h.namespace] == 0 {
		delete(q.namespaces, h.namespace)
	}
	if h.kind == service.ExternalIP {
		q.external += sign * h.sockets
	}
}

// externalShare is the part of all sockets that external IPs may have: one in so
// many. The rest is for node ports, which the API server assigns.
const externalShare = 4

// allowed returns why there may be no more sockets of a kind, or nil.
func (q *quotas) allowed(h holding) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.allowedLocked(h)
}

// allowedLocked is allowed for a caller with the lock. A namespace may hold no more
// sockets than are free afterwards: alone half of all, beside one that holds that many a
// quarter, and so on, so that there is always room for another one.
func (q *quotas) allowedLocked(h holding) error {
	if q.sockets >= q.max {
		return fmt.Errorf("there are %d already", q.max)
	}
	if q.descriptors != nil {
		if err := q.descriptors.CanHoldBack(q.sockets + h.sockets); err != nil {
			return err
		}
	}
	if h.kind == service.ClusterIP {
		return nil
	}
	if has := q.namespaces[h.namespace]; has > 0 && has+h.sockets > q.max-q.sockets-h.sockets {
		return fmt.Errorf("namespace %s holds %d of %d, and may hold no more than are free", h.namespace, has, q.max)
	}
	if h.kind == service.ExternalIP && q.external > 0 && q.external+h.sockets > q.max/externalShare {
		return fmt.Errorf("external IPs hold %d of %d, which is their share", q.external, q.max)
	}
	return nil
}

// total returns the number of sockets.
func (q *quotas) total() int64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.sockets
}
