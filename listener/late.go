package listener

import (
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// A client whose first packet was answered has a connection, as far as it knows,
// whatever becomes of the service before we have accepted it. So steering is
// taken from a destination before the new policy comes into force; whoever is
// accepted afterwards has come before, and is served by the policy of that time.
// For lateTime, that policy is remembered, and the listening sockets stay.

// lateTime is how long a handshake may take that began before its destination
// went: some round trips, or one packet that is lost.
const lateTime = time.Second

// Bounds of what is kept for who comes late; beyond them the oldest goes first.
const (
	mostPast    = 16
	mostLeaving = 1024
)

// past is a configuration that was in force until destinations were withdrawn.
// It has no past of its own.
type past struct {
	*state
	until int64 // nobody comes any more who is late; as poll.Nanotime
}

// keepPast gives the past of what comes after prev: prev itself belongs to it
// when destinations are withdrawn.
func keepPast(prev *state, withdraws bool, now int64) []past {
	kept := slices.DeleteFunc(slices.Clone(prev.past), func(p past) bool { return p.until < now })
	if withdraws {
		before := &state{table: prev.table, pools: prev.pools, host: prev.host}
		kept = append(kept, past{before, now + int64(lateTime)})
	}
	return kept[max(0, len(kept)-mostPast):]
}

// forgetPast forgets configurations that nobody needs any more.
func (m *Manager) forgetPast() {
	s := m.state.Load()
	if kept := keepPast(s, false, m.clock()); len(kept) < len(s.past) {
		m.state.Store(&state{table: s.table, pools: s.pools, host: s.host, past: kept})
	}
}

// late decides about a connection that the policy in force does not accept. If
// steering leads nobody new to its destination, it was on its way when the
// destination was withdrawn, and the last policy that had it decides. Otherwise,
// and where none had it, the verdict stays.
func (s *state) late(client netip.Addr, vip netip.AddrPort, verdict policy.Verdict, now int64) (*state, policy.Verdict) {
	dst := service.Destination{Addr: vip.Addr(), Port: vip.Port(), Protocol: service.TCP}
	if s.table.Steering(dst) == policy.Accept {
		return s, verdict
	}
	for _, p := range slices.Backward(s.past) {
		if now <= p.until && p.table.Steering(dst) == policy.Accept {
			return p.state, p.table.Resolve(service.TCP, client, vip)
		}
	}
	return s, verdict
}

// withdrawn parts changes: those of destinations that nobody new is to come to,
// and all others.
func withdrawn(changes []change) (going, others []change) {
	for _, ch := range changes {
		if ch.old != nil && ch.old.action == policy.Accept && (ch.new == nil || ch.new.action != policy.Accept) {
			going = append(going, ch)
		} else {
			others = append(others, ch)
		}
	}
	return going, others
}

// leaving are listening sockets that nothing new comes to. They are closed when
// nobody is late any more.
type leaving struct {
	list []left // oldest first
}

type left struct {
	socket *socket
	dst    service.Destination // what it is bound to; zero for a lane's
	until  int64
}

func (l *leaving) any() bool { return len(l.list) > 0 }

func (l *leaving) add(s *socket, dst service.Destination, now int64) {
	l.list = append(l.list, left{s, dst, now + int64(lateTime)})
}

// at gives the sockets that are bound to a destination, and keep others from it.
func (l *leaving) at(dst service.Destination) (sockets []*socket) {
	for _, e := range l.list {
		if e.dst == dst {
			sockets = append(sockets, e.socket)
		}
	}
	return sockets
}

// all gives them all, and forgets them.
func (l *leaving) all() (sockets []*socket) {
	for _, e := range l.list {
		sockets = append(sockets, e.socket)
	}
	l.list = nil
	return sockets
}

// retire has a socket go that nothing new comes to. dst is what it is bound to;
// zero for a lane's.
func (m *Manager) retire(s *socket, dst service.Destination) {
	m.uncount(s)
	m.leftOpen(s, 0)
	if s.stopped {
		m.letGo(s)
		return
	}
	m.leaving.add(s, dst, m.clock())
}

// letGo closes a socket. Others can have its address and port at once, not when
// all workers have left it.
func (m *Manager) letGo(s *socket) {
	sys.LetGo(s.fd)
	m.discard(s)
}

// silenced is a claim whose socket lets handshakes end that have begun, and is to
// be wholly silent when nobody is late any more.
type silenced struct {
	claim  *claim
	socket *socket
	until  int64
}

// closeLeft closes or silences the sockets that nobody is late for any more.
func (m *Manager) closeLeft() {
	now := m.clock()
	done := 0
	for ; done < len(m.silenced) && m.silenced[done].until < now; done++ {
		if e := m.silenced[done]; e.claim.socket == e.socket && e.claim.does == policy.Drop {
			e.socket.filter(nobody) // the other one goes on to keep newcomers out
		}
	}
	m.silenced = slices.Delete(m.silenced, 0, done)
	n := max(0, len(m.leaving.list)-mostLeaving)
	for n < len(m.leaving.list) && m.leaving.list[n].until < now {
		n++
	}
	for _, e := range m.leaving.list[:n] {
		m.letGo(e.socket)
	}
	m.leaving.list = slices.Delete(m.leaving.list, 0, n)
}
