package stream

import (
	"net/netip"
	"slices"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Bounds of what is kept for the grace period; beyond them the oldest goes first.
const (
	maxPast    = 16
	maxClosing = 1024
)

// past is a configuration that was in force until destinations were withdrawn. It
// has no past of its own.
type past struct {
	*state
	until int64 // end of the grace period, as poll.Nanotime
}

// keepPast returns the past configurations of what follows prev: prev itself is one
// of them when destinations are withdrawn.
func keepPast(prev *state, withdrawn bool, now int64) []past {
	kept := slices.DeleteFunc(slices.Clone(prev.past), func(p past) bool { return p.until < now })
	if withdrawn {
		before := &state{table: prev.table, pools: prev.pools, host: prev.host}
		kept = append(kept, past{before, now + int64(redirect.Grace)})
	}
	return kept[max(0, len(kept)-maxPast):]
}

// inGrace decides about a connection that the policy in force does not accept. If
// nothing new is steered to its destination, its handshake began before the
// destination was withdrawn, and the last policy that served it decides. Otherwise,
// and where no policy served it, the verdict stays.
func (s *state) inGrace(protocol service.Protocol, client netip.Addr, vip netip.AddrPort, verdict policy.Verdict, now int64) (*state, policy.Verdict) {
	dst := service.Destination{Addr: vip.Addr(), Port: vip.Port(), Protocol: protocol}
	if s.table.Steering(dst) == policy.Accept {
		return s, verdict
	}
	for _, p := range slices.Backward(s.past) {
		if now <= p.until && p.table.Steering(dst) == policy.Accept {
			return p.state, p.table.Resolve(protocol, client, vip)
		}
	}
	return s, verdict
}

// grace holds the sockets that are in their grace period.
type grace struct {
	closing  []closing  // oldest first
	dropping []dropping // oldest first
}

// closing is a listening socket that is no longer steered to, waiting to be closed.
type closing struct {
	socket *socket
	dst    service.Destination // what it is bound to; zero for a socket that is steered to
	until  int64
}

// dropping is a bound socket that drops new connections and lets handshakes finish
// that have begun. Afterwards it drops every packet.
type dropping struct {
	bound  *boundSocket
	socket *socket // the bound one's when it began
	until  int64
}

// drop begins the grace period of a socket that drops new connections.
func (g *grace) drop(b *boundSocket, now int64) {
	g.dropping = append(g.dropping, dropping{b, b.socket, now + int64(redirect.Grace)})
}

// at returns the sockets that are bound to a destination, and keep others from it.
func (g *grace) at(dst service.Destination) (sockets []*socket) {
	for _, c := range g.closing {
		if c.dst == dst {
			sockets = append(sockets, c.socket)
		}
	}
	return sockets
}

// InGrace reports whether Prune will have something to end.
func (s *Server) InGrace() bool {
	return len(s.grace.closing) > 0 || len(s.grace.dropping) > 0 || len(s.state.Load().past) > 0
}

// retire closes a socket after the grace period. dst is what it is bound to; zero
// for a socket that was steered to.
func (s *Server) retire(sock *socket, dst service.Destination) {
	s.uncount(sock)
	s.setUnfiltered(sock, 0)
	if sock.stopped {
		s.closeNow(sock)
		return
	}
	s.grace.closing = append(s.grace.closing, closing{sock, dst, s.clock() + int64(redirect.Grace)})
}

// closeNow closes a socket. Others can have its address and port at once, not only
// when all workers have left it.
func (s *Server) closeNow(sock *socket) {
	sys.LetGo(sock.fd)
	s.discard(sock)
}

// endGrace ends the grace periods that are over.
func (s *Server) endGrace() {
	now := s.clock()
	g := &s.grace
	done := 0
	for ; done < len(g.dropping) && g.dropping[done].until < now; done++ {
		if d := g.dropping[done]; d.bound.socket == d.socket && d.bound.does == policy.Drop {
			d.socket.filter(dropAll) // on an error the filter in force still drops new connections
		}
	}
	g.dropping = slices.Delete(g.dropping, 0, done)
	n := max(0, len(g.closing)-maxClosing)
	for n < len(g.closing) && g.closing[n].until < now {
		n++
	}
	for _, c := range g.closing[:n] {
		s.closeNow(c.socket)
	}
	g.closing = slices.Delete(g.closing, 0, n)
	st := s.state.Load()
	if kept := keepPast(st, false, now); len(kept) < len(st.past) {
		s.state.Store(&state{table: st.table, pools: st.pools, host: st.host, past: kept})
	}
}
