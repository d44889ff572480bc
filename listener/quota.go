package listener

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

// quota counts what the connections of one Service, or of one namespace, use
// together. All loops use it; it takes no lock.
type quota struct {
	object  string       // for the log
	open    atomic.Int64 // connections, from accept to end
	dialing atomic.Int64 // those of them that have no endpoint yet
	warned  atomic.Int64 // when the log said last that the limit is reached
	pools   int          // that it belongs to; the manager's
}

// quotas are those of all Services and namespaces. The manager's.
type quotas struct {
	services   map[service.Name]*quota
	namespaces map[string]*quota
	// left may have connections, and have no service port any more. They keep
	// their counts, or a Service would get more by being deleted and made anew.
	left []service.Name
}

func newQuotas() quotas {
	return quotas{services: make(map[service.Name]*quota), namespaces: make(map[string]*quota)}
}

// join gives a pool its quotas.
func (q *quotas) join(p *pool) {
	name := p.port.Name.Name
	if q.services[name] == nil {
		q.services[name] = &quota{object: "Service " + name.String()}
	}
	if q.namespaces[name.Namespace] == nil {
		q.namespaces[name.Namespace] = &quota{object: "Namespace " + name.Namespace}
	}
	p.service, p.namespace = q.services[name], q.namespaces[name.Namespace]
	p.service.pools++
	p.namespace.pools++
}

// leave takes a pool's quotas back.
func (q *quotas) leave(p *pool) {
	p.service.pools--
	p.namespace.pools--
	q.left = append(q.left, p.port.Name.Name)
}

// sweep forgets the quotas that nobody uses any more.
func (q *quotas) sweep() {
	kept := q.left[:0]
	for _, name := range q.left {
		s, n := q.services[name], q.namespaces[name.Namespace]
		if s != nil && s.unused() {
			delete(q.services, name)
		}
		if n != nil && n.unused() {
			delete(q.namespaces, name.Namespace)
		}
		if s != nil && s.pools == 0 && s.open.Load() > 0 {
			kept = append(kept, name)
		}
	}
	clear(q.left[len(kept):])
	q.left = kept
}

func (q *quota) unused() bool { return q.pools == 0 && q.open.Load() == 0 }

// beginDialing takes a place among those that wait for an endpoint; false if
// there is none.
func (q *quota) beginDialing(most int64) bool {
	if q.dialing.Add(1) <= most {
		return true
	}
	q.dialing.Add(-1)
	return false
}

// warnEvery is the least time between two lines about one limit.
const warnEvery = int64(time.Minute)

// overLimit gives the end of a connection that is one too many for its Service or
// namespace, EndNone if it is not.
func (c *conn) overLimit() conntrack.End {
	m, p := c.worker.manager, c.pool
	if most := m.mostOf(m.config.MaxServiceConnections); p.service.open.Load() > most {
		m.warnOfLimit(p.service, most, "--max-connections-per-service")
		return conntrack.LimitReached
	}
	if most := m.mostOf(m.config.MaxNamespaceConnections); p.namespace.open.Load() > most {
		m.warnOfLimit(p.namespace, most, "--max-connections-per-namespace")
		return conntrack.NamespaceLimit
	}
	return conntrack.EndNone
}

// mostOf gives how many connections a configured limit of one Service or namespace
// allows now. Claims take descriptors from connections: 1/32 of what they leave stays
// for others, if the limit keeps that much for others at all.
func (m *Manager) mostOf(configured int) int64 {
	limit := m.limit.Load()
	others := min(int64(m.config.MaxConnections-configured), limit/32)
	return min(int64(configured), limit-others)
}

// warnOfLimit says, once a minute, that a limit is reached.
func (m *Manager) warnOfLimit(q *quota, limit int64, flag string) {
	now, last := m.clock(), q.warned.Load()
	if last != 0 && now-last < warnEvery || !q.warned.CompareAndSwap(last, max(now, 1)) {
		return
	}
	m.log.Warn().Str("object", q.object).Msg("has " + strconv.FormatInt(limit, 10) + " connections open on this node, as many as " + flag + " allows: further ones are reset")
}
