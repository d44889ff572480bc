package listener

import (
	"fmt"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// claims are the destinations that have sockets of their own, or should have.
type claims struct {
	all     map[service.Destination]*claim
	missing map[service.Destination]*claim // those without a socket
	shares  shares
}

func newClaims() claims {
	return claims{
		all:     make(map[service.Destination]*claim),
		missing: make(map[service.Destination]*claim),
		shares:  shares{namespaces: make(map[string]int64)},
	}
}

// retryShare is how many claims are tried again at once.
const retryShare = 1024

// tightenClaims puts in force, before a new policy is, what the policy accepts
// no more: it is refused or silent by then.
func (m *Manager) tightenClaims(changes []change) {
	for _, ch := range changes {
		if ch.old == nil || !ch.old.claimed {
			continue
		}
		c := m.claims.all[ch.old.dst]
		switch {
		case ch.new == nil || !ch.new.claimed:
			if c.socket != nil {
				m.unclaim(c)
			}
			delete(m.claims.all, ch.old.dst)
			delete(m.claims.missing, ch.old.dst)
		case c.socket != nil && c.does == policy.Accept && ch.new.action != policy.Accept:
			c.outlet = ch.new
			m.adjust(c)
		}
	}
}

// settleClaims puts the rest in force, after the new policy is.
func (m *Manager) settleClaims(changes []change) {
	var tried []*claim
	for _, ch := range changes {
		if ch.new == nil || !ch.new.claimed {
			continue
		}
		c := m.claims.all[ch.new.dst]
		if c == nil {
			c = new(claim)
			m.claims.all[ch.new.dst] = c
		}
		c.outlet = ch.new
		if c.socket != nil {
			m.adjust(c)
		}
		if c.socket == nil {
			m.tryClaim(c)
			tried = append(tried, c)
		}
	}
	m.tellClaims(tried)
}

// retryClaims tries again what could not be claimed. It gives the outlets whose
// destinations are ours now.
func (m *Manager) retryClaims() (won []*outlet) {
	var tried []*claim
	for _, c := range m.claims.missing { // in no order, so that all have their turn
		if len(tried) == retryShare {
			break
		}
		m.tryClaim(c)
		tried = append(tried, c)
		if c.socket != nil {
			won = append(won, c.outlet)
		}
	}
	m.tellClaims(tried)
	return won
}

// adjust has a claim's socket do what its outlet says. A claim whose socket
// does not obey has none.
func (m *Manager) adjust(c *claim) {
	if err := m.become(c); err != nil {
		m.unclaim(c)
	}
	m.account(c) // it may be another Service's now
}

// tryClaim makes a claim's socket, or takes note of why it cannot be made.
// Claims that have one keep it; the rest wait until there is room.
func (m *Manager) tryClaim(c *claim) {
	was := c.fault
	if err := m.allows(c); err != nil {
		c.fault, c.problem = noRoom, err
	} else if err := m.claim(c); err != nil {
		c.fault, c.problem = faultOf(err), err
	}
	if c.fault == noFault {
		delete(m.claims.missing, c.outlet.dst)
		return
	}
	m.claims.missing[c.outlet.dst] = c
	if c.fault == portTaken && was != portTaken {
		m.stats.conflictsTotal.Add(1)
	}
}

// countClaims brings up to date what is shown of the claims that are missing.
func (m *Manager) countClaims() {
	taken := int64(0)
	for _, c := range m.claims.missing {
		if c.fault == portTaken {
			taken++
		}
	}
	m.stats.conflicts.Store(taken)
	m.stats.unclaimed.Store(int64(len(m.claims.missing)) - taken)
	m.setLimit()
}

// news is what the log says in one line: the addresses of one port of a service
// that one thing happened to.
type news struct {
	name  service.PortName
	kind  service.AddressKind
	port  uint16
	own   bool
	fault fault
}

// tellClaims says in the log what is new about claims: once that something
// stands in their way, and when it is over.
func (m *Manager) tellClaims(tried []*claim) {
	found := make(map[news][]*claim)
	var order []news
	for _, c := range tried {
		if c.fault == c.told {
			continue
		}
		c.told = c.fault
		o := c.outlet
		n := news{name: o.name, kind: o.kind, port: o.dst.Port, own: o.own, fault: c.fault}
		if found[n] == nil {
			order = append(order, n)
		}
		found[n] = append(found[n], c)
	}
	full := 0
	for _, n := range order {
		if n.fault == noRoom {
			if full++; full > mostFull {
				continue
			}
		}
		object := "Service " + n.name.Name.String()
		if n.fault == noFault {
			m.log.Info().Str("object", object).Msgf("%s is served now", subject(n, found[n]))
			continue
		}
		text := fmt.Sprintf("%s is not served: %s", subject(n, found[n]), remedy(n, found[n][0].problem))
		m.log.Warn().Str("object", object).Msg(text)
		m.report(n.name.Name, text)
	}
	if full > mostFull {
		m.log.Warn().Msgf("%d more ports of Services are not served for want of room", full-mostFull)
	}
	m.countClaims()
}

// mostFull is how many ports are named at once that there is no room for.
const mostFull = 16

// subjectAddresses is how many addresses one line of the log names.
const subjectAddresses = 4

// subject names the destinations of claims: "node port 30080/TCP on 10.0.0.1
// and 10.1.0.1".
func subject(n news, list []*claim) string {
	var addrs []string
	for _, c := range list {
		addrs = append(addrs, c.outlet.dst.Addr.String())
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

// remedy says why claims failed and what to do.
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
