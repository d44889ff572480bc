package datagram

import (
	"sync/atomic"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

// places are those of a Service's sessions, of all loops and of those that the kernel forwards.
// They count only if Config.CountForwarded is set: else each loop has its part of the limits.
type places struct {
	server *Server
	group  *groups
}

// Places returns those of a service port as of the last Apply, or nil.
func (s *Server) Places(name service.PortName) conntrack.Places {
	if p := s.services[name]; p != nil && s.options.CountForwarded {
		return &places{s, p.group}
	}
	return nil
}

// Bounded implements conntrack.Places.
func (p *places) Bounded() bool { return p.server.options.CountForwarded }

// Take implements conntrack.Places. LimitReached is the Service's limit, and EndNone that of all.
func (p *places) Take(*service.Limits) (end conntrack.End, ok bool) {
	o := &p.server.options
	if !o.CountForwarded {
		return conntrack.EndNone, true
	}
	if !addBelow(&p.group.open, o.MaxServiceSessions) {
		return conntrack.LimitReached, false
	}
	if !addBelow(&p.server.open, o.MaxSessions) {
		p.group.open.Add(-1)
		return conntrack.EndNone, false
	}
	return conntrack.EndNone, true
}

// addBelow adds one to n, unless it is most.
func addBelow(n *atomic.Int64, most int) bool {
	for {
		was := n.Load()
		if was >= int64(most) {
			return false
		}
		if n.CompareAndSwap(was, was+1) {
			return true
		}
	}
}

// Add implements conntrack.Places.
func (p *places) Add() { p.add(1) }

// Give implements conntrack.Places.
func (p *places) Give() { p.add(-1) }

func (p *places) add(n int64) {
	if p.server.options.CountForwarded {
		p.group.open.Add(n)
		p.server.open.Add(n)
	}
}

// Full implements conntrack.Places. No limit of sessions is an endpoint's.
func (*places) Full(*service.Limits) {}

func (h *serviceSessions) places() *places { return &places{h.worker.server, h.service.group} }

// takePlace takes a place for a session, if need be that of another one on this loop. If there is
// none, the kernel's data path makes room for the client's next datagram.
func (w *worker) takePlace(h *serviceSessions) bool {
	p := h.places()
	for {
		end, ok := p.Take(nil)
		switch {
		case ok:
			return true
		case end == conntrack.LimitReached && h.group.count > 0:
			h.group.members.largest().oldest().evict()
		case end == conntrack.EndNone && w.count > 0:
			w.victim(h.group).oldest().evict()
		default:
			if crowded := w.server.options.Crowded; crowded != nil {
				crowded(h.service.name, end)
			}
			return false
		}
	}
}
