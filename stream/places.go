package stream

import (
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

// places are those of a service port's connections that the kernel forwards: they count together
// with the Server's own.
type places struct {
	server *Server
	pool   *pool
}

// Places returns those of a service port as of the last Apply, or nil.
func (s *Server) Places(name service.PortName) conntrack.Places {
	if p := s.pools[name]; p != nil {
		return &places{s, p}
	}
	return nil
}

// Bounded implements conntrack.Places.
func (p *places) Bounded() bool { return p.server.config.CountForwarded }

// Take implements conntrack.Places. Beyond the limit of all connections, clients wait in the
// queues of listening sockets, in front of those that come later.
func (p *places) Take(l *service.Limits) (end conntrack.End, ok bool) {
	s := p.server
	if p.Bounded() {
		if s.paused.Load() > 0 || !s.enter() {
			return conntrack.EndNone, false
		}
		if end := p.pool.enter(s).end(); end != conntrack.EndNone {
			s.open.Add(-1)
			return end, false
		}
		s.forwarded.Add(1)
	}
	if !p.pool.service.serve(int64(l.Connections)) {
		s.warnOfLimit(p.pool.service, int64(l.Connections), maxConnections, "are reset")
		p.leave()
		return conntrack.LimitReached, false
	}
	return conntrack.EndNone, true
}

// Add implements conntrack.Places.
func (p *places) Add() {
	p.pool.service.served.Add(1)
	if p.Bounded() {
		p.pool.countOpen(p.server)
		p.server.forwarded.Add(1)
	}
}

// Give implements conntrack.Places.
func (p *places) Give() {
	p.pool.service.served.Add(-1)
	p.pool.service.queue.freed(p.pool)
	p.leave()
}

// leave undoes what Take and Add do if the Places are Bounded. Sockets that are paused at the limit of
// all connections are accepted from again.
func (p *places) leave() {
	s := p.server
	if !p.Bounded() {
		return
	}
	p.pool.uncountOpen(s)
	s.forwarded.Add(-1)
	if s.paused.Load() > 0 && s.open.Load() < s.resumeBelow() && s.resuming.CompareAndSwap(false, true) {
		for _, w := range s.workers {
			w.post(func() {
				s.resuming.Store(false)
				w.resume()
			})
		}
	}
}

// Full implements conntrack.Places.
func (p *places) Full(l *service.Limits) {
	p.server.warnOfLimit(p.pool.service, int64(l.PerEndpoint), maxPerEndpoint, "are reset")
}
