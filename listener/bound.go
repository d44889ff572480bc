package listener

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// boundPort is a destination that has, or should have, a socket bound to it: a node
// port, a Service's address that is one of this node's (A3.15), or, where steering
// only makes addresses local, any destination. A port that another program holds is
// not taken from it: the bound port is not open then, and is tried again.
type boundPort struct {
	*destination
	open    bool          // the protocol's Ports have bound it
	does    policy.Action // what it was bound for last
	fault   fault         // why it is not open
	problem error         // the same as an error
	logged  fault         // the fault that is in the log
	counted holding       // what the quotas count of it
}

// fault is why a destination cannot be bound.
type fault uint8

const (
	noFault     fault = iota
	portTaken         // another program holds it
	noRoom            // the limit of bound ports is reached, or descriptors or memory ran out
	noPrivilege       // a port below net.ipv4.ip_unprivileged_port_start
	otherFault        // another error of the kernel
)

// faultOf returns the fault that an error of Ports.Bind means.
func faultOf(err error) fault {
	var errno sys.Errno
	if !errors.As(err, &errno) {
		return otherFault
	}
	switch errno {
	case sys.EADDRINUSE:
		return portTaken
	case sys.EMFILE, sys.ENFILE, sys.ENOBUFS, sys.ENOMEM:
		return noRoom
	case sys.EACCES, sys.EPERM:
		return noPrivilege
	}
	return otherFault
}

// boundPorts are all bound ports of a Manager.
type boundPorts struct {
	all     map[service.Destination]*boundPort
	missing map[service.Destination]*boundPort // those that are not open
	quotas  quotas
	report  func(service.Name, string)

	conflicts      atomic.Int64
	conflictsTotal atomic.Uint64
	unbound        atomic.Int64
}

func (b *boundPorts) init(o *Options) {
	b.all = make(map[service.Destination]*boundPort)
	b.missing = make(map[service.Destination]*boundPort)
	b.quotas.max, b.quotas.descriptors, b.quotas.namespaces = int64(o.MaxBound), o.Descriptors, make(map[string]int64)
	b.report = o.Report
}

// has reports whether a destination has an open bound port.
func (b *boundPorts) has(dst service.Destination) bool {
	p := b.all[dst]
	return p != nil && p.open
}

// retryShare is how many missing ports are tried again at once.
const retryShare = 1024

// restrictBound makes bound ports stop accepting what the new policy no longer accepts, before the
// policy is published.
func (m *Manager) restrictBound(changes []change) {
	for _, ch := range changes {
		if ch.old == nil || !ch.old.bound {
			continue
		}
		p := m.bound.all[ch.old.Destination]
		switch {
		case ch.new == nil || !ch.new.bound:
			if p.open {
				m.unbind(p)
			}
			delete(m.bound.all, ch.old.Destination)
			delete(m.bound.missing, ch.old.Destination)
		case p.open && p.does == policy.Accept && ch.new.Action != policy.Accept:
			p.destination = ch.new
			_ = m.bind(p) // settleBound tries again
		}
	}
}

// settleBound updates the other bound ports, after the new policy was published.
func (m *Manager) settleBound(changes []change) {
	var tried []*boundPort
	for _, ch := range changes {
		if ch.new == nil || !ch.new.bound {
			continue
		}
		p := m.bound.all[ch.new.Destination]
		if p == nil {
			p = new(boundPort)
			m.bound.all[ch.new.Destination] = p
		}
		p.destination = ch.new
		if p.open && m.bind(p) == nil {
			continue
		}
		m.tryBind(p)
		tried = append(tried, p)
	}
	m.logBound(tried)
}

// retryBound tries the missing ports again, and returns the destinations of those
// that are bound now.
func (m *Manager) retryBound() (won []*destination) {
	var tried []*boundPort
	for _, p := range m.bound.missing { // in random order, so that all have their turn
		if len(tried) == retryShare {
			break
		}
		m.tryBind(p)
		tried = append(tried, p)
		if p.open {
			won = append(won, p.destination)
		}
	}
	m.logBound(tried)
	return won
}

// bind makes a port's socket do what its destination says. On an error it is not open.
func (m *Manager) bind(p *boundPort) error {
	err := m.protocols[p.Protocol].Bind(p.Opening)
	p.open, p.does = err == nil, p.Action
	m.account(p) // it may be another Service's now
	return err
}

func (m *Manager) unbind(p *boundPort) {
	m.protocols[p.Protocol].Unbind(p.Destination)
	p.open = false
	m.account(p)
}

// tryBind binds a port that is not open, or notes why it cannot be bound.
func (m *Manager) tryBind(p *boundPort) {
	was := p.fault
	p.fault, p.problem = noFault, nil
	if err := m.bound.quotas.allowed(m.holding(p)); err != nil {
		p.fault, p.problem = noRoom, err
	} else if err := m.bind(p); err != nil {
		p.fault, p.problem = faultOf(err), err
	}
	if p.fault == noFault {
		delete(m.bound.missing, p.Destination)
		return
	}
	m.bound.missing[p.Destination] = p
	if p.fault == portTaken && was != portTaken {
		m.bound.conflictsTotal.Add(1)
	}
}

// countBound updates the statistics.
func (m *Manager) countBound() {
	b := &m.bound
	taken := int64(0)
	for _, p := range b.missing {
		if p.fault == portTaken {
			taken++
		}
	}
	b.conflicts.Store(taken)
	b.unbound.Store(int64(len(b.missing)) - taken)
}

// news is one line of the log: the addresses of one service port that share a result.
type news struct {
	name  service.PortName
	kind  service.AddressKind
	port  uint16
	own   bool
	fault fault
}

// logBound logs what is new about bound ports: once that they cannot be bound, and
// when they are bound.
func (m *Manager) logBound(tried []*boundPort) {
	found := make(map[news][]*boundPort)
	var order []news
	for _, p := range tried {
		if p.fault == p.logged {
			continue
		}
		p.logged = p.fault
		n := news{name: p.Name, kind: p.Kind, port: p.Port, own: p.own, fault: p.fault}
		if found[n] == nil {
			order = append(order, n)
		}
		found[n] = append(found[n], p)
	}
	full := 0
	for _, n := range order {
		if n.fault == noRoom {
			if full++; full > maxNoRoom {
				continue
			}
		}
		object := "Service " + n.name.Name.String()
		if n.fault == noFault {
			m.options.Logger.Info().Str("object", object).Msgf("%s is served now", subject(n, found[n]))
			continue
		}
		text := fmt.Sprintf("%s is not served: %s", subject(n, found[n]), remedy(n, found[n][0].problem))
		m.options.Logger.Warn().Str("object", object).Msg(text)
		m.bound.report(n.name.Name, text)
	}
	if full > maxNoRoom {
		m.options.Logger.Warn().Msgf("%d more ports of Services are not served for want of room", full-maxNoRoom)
	}
	m.countBound()
}

// maxNoRoom is how many ports without room are named at once.
const maxNoRoom = 16

// subjectAddresses is how many addresses one line of the log names.
const subjectAddresses = 4

// subject names the destinations of bound ports: "node port 30080/TCP on 10.0.0.1 and
// 10.1.0.1".
func subject(n news, list []*boundPort) string {
	var addrs []string
	for _, p := range list {
		addrs = append(addrs, p.Addr.String())
	}
	slices.Sort(addrs)
	if more := len(addrs) - subjectAddresses; more > 0 {
		addrs = append(addrs[:subjectAddresses], fmt.Sprintf("%d more addresses", more))
	}
	on := addrs[0]
	if last := len(addrs) - 1; last > 0 {
		on = strings.Join(addrs[:last], ", ") + " and " + addrs[last]
	}
	what := "node port"
	if n.kind != service.NodePort {
		what = n.kind.String() + " port"
	}
	return fmt.Sprintf("%s %d/%s on %s", what, n.port, n.name.Protocol, on)
}

// remedy says why ports could not be bound and what to do.
func remedy(n news, problem error) string {
	switch n.fault {
	case portTaken:
		who := "another program listens there"
		choice := "give the Service another node port"
		if !n.own {
			who = "another program listens on that port of every address, and answers in the Service's place"
			choice = "have it listen on the node's own addresses only"
		} else if n.kind != service.NodePort {
			choice = "have it listen on other addresses"
		}
		return fmt.Sprintf("%s. Stop it, or %s; ss -lntup 'sport = :%d' names it. The port is taken as soon as it is free", who, choice, n.port)
	case noRoom:
		return fmt.Sprintf("too many ports are held, or descriptors ran out (%v): raise --max-claims or the limit of open files, or have node ports on fewer addresses (--nodeport-addresses)", problem)
	case noPrivilege:
		return fmt.Sprintf("a port below net.ipv4.ip_unprivileged_port_start needs CAP_NET_BIND_SERVICE (%v)", problem)
	}
	return fmt.Sprintf("%v; it is tried again every second", problem)
}
