package stream

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

// quota counts the connections of one Service, or of one namespace. All loops use
// it; it takes no lock.
type quota struct {
	object  string       // for the log
	open    atomic.Int64 // connections, from accept to end
	dialing atomic.Int64 // those of them that have no endpoint yet
	served  atomic.Int64 // those of them that have an endpoint or are being dialled
	warned  atomic.Int64 // when the log last said that the limit is reached
	queue   queue        // a Service's
	pools   int          // of its service ports; the Server's
}

// quotas are those of all Services and namespaces. They belong to the configuring
// goroutine.
type quotas struct {
	services   map[service.Name]*quota
	namespaces map[string]*quota
	// removed have no service port any more, but may have connections. They keep
	// their counts, so that a Service gets no more by being deleted and made anew.
	removed []service.Name
}

func newQuotas() quotas {
	return quotas{services: make(map[service.Name]*quota), namespaces: make(map[string]*quota)}
}

// join gives a Service's new pool its quotas.
func (q *quotas) join(p *pool, name service.Name) {
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

// leave undoes join.
func (q *quotas) leave(p *pool) {
	p.service.pools--
	p.namespace.pools--
	q.removed = append(q.removed, p.port.Name.Name)
}

// sweep forgets the quotas that are not used any more.
func (q *quotas) sweep() {
	kept := q.removed[:0]
	for _, name := range q.removed {
		s, n := q.services[name], q.namespaces[name.Namespace]
		if s != nil && s.unused() {
			delete(q.services, name)
		}
		if n != nil && n.unused() {
			delete(q.namespaces, name.Namespace)
		}
		if s != nil && s.pools == 0 && !s.unused() {
			kept = append(kept, name)
		}
	}
	clear(q.removed[len(kept):])
	q.removed = kept
}

func (q *quota) unused() bool {
	return q.pools == 0 && q.open.Load() == 0 && q.served.Load() == 0
}

// beginDialing counts one more connection that is being dialled; false if there are
// as many as the limit.
func (q *quota) beginDialing(most int64) bool {
	if q.dialing.Add(1) <= most {
		return true
	}
	q.dialing.Add(-1)
	return false
}

// serve counts one more connection that is served; false if there are as many as the limit.
// 0 means none.
func (q *quota) serve(most int64) bool {
	if most <= 0 {
		q.served.Add(1)
		return true
	}
	return addBelow(&q.served, most)
}

// Annotations of limits, for the log.
const (
	maxConnections = "sluice.dev/max-connections"
	maxPerEndpoint = "sluice.dev/max-connections-per-endpoint (for each endpoint)"
)

// warnEvery is the least time between two lines about one limit.
const warnEvery = int64(time.Minute)

// enter counts one more connection; false if there are as many as the limit.
func (q *quota) enter(most int64) bool { return addBelow(&q.open, most) }

// addBelow adds one to n, unless it is most.
func addBelow(n *atomic.Int64, most int64) bool {
	for {
		was := n.Load()
		if was >= most {
			return false
		}
		if n.CompareAndSwap(was, was+1) {
			return true
		}
	}
}

// enter counts one more connection of all; false if there are as many as the limit.
func (s *Server) enter() bool { return addBelow(&s.open, s.limit.Load()) }

// enter counts one more connection of the service port's Service and namespace, unless one of them has
// as many as its limit: it returns which.
func (p *pool) enter(s *Server) counted {
	if most := s.mostOf(s.config.MaxServiceConnections, 16); !p.service.enter(most) {
		s.warnOfLimit(p.service, most, "--max-connections-per-service", "are reset")
		return beyondService
	}
	if most := s.mostOf(s.config.MaxNamespaceConnections, 32); !p.namespace.enter(most) {
		p.service.open.Add(-1)
		s.warnOfLimit(p.namespace, most, "--max-connections-per-namespace", "are reset")
		return beyondNamespace
	}
	return 0
}

// end returns the end of a connection that is beyond the limit of its Service or namespace,
// EndNone if it is not.
func (c counted) end() conntrack.End {
	switch {
	case c&beyondService != 0:
		return conntrack.LimitReached
	case c&beyondNamespace != 0:
		return conntrack.NamespaceLimit
	}
	return conntrack.EndNone
}

// leave undoes enter. Places become free in the opposite order, so that whoever gets one finds
// the others.
func (p *pool) leave() {
	p.namespace.open.Add(-1)
	p.service.open.Add(-1)
}

// mostOf returns how many connections a configured limit of one Service or namespace
// allows now. HoldBack takes descriptors from connections: 1/share of what it leaves stays
// for others, if the limit keeps that much for others at all. Half of what a Service
// leaves is for its own namespace.
func (s *Server) mostOf(configured int, share int64) int64 {
	limit := s.limit.Load()
	others := min(int64(s.config.MaxConnections-configured), limit/share)
	return min(int64(configured), limit-others)
}

// warnOfLimit logs, at most once a minute, that a limit is reached.
func (s *Server) warnOfLimit(q *quota, limit int64, flag, what string) {
	now, last := s.clock(), q.warned.Load()
	if last != 0 && now-last < warnEvery || !q.warned.CompareAndSwap(last, max(now, 1)) {
		return
	}
	s.options.Logger.Warn().Str("object", q.object).
		Msg("has " + strconv.FormatInt(limit, 10) + " connections open on this node, as many as " + flag + " allows: further ones " + what)
}
