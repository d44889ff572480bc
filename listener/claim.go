package listener

import (
	"errors"
	"net/netip"

	"github.com/sluice-proxy/sluice/internal/sockfilter"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// claim is a socket of ours that is bound to a destination itself: to a node
// port, and to a Service's address that is one of this node's (A3.15); where
// steering only makes addresses local, to every destination. A port that
// another program holds is not taken from it: the claim has no socket then, and
// is tried again.
//
// There is one whatever becomes of the destination, so that nobody else gets
// the port in between:
//
//	Accept  it listens, with a filter if not everybody may come in
//	Drop    it listens with a filter that drops everything (F5), at first all
//	        but handshakes that have begun
//	Refuse  it is bound, and listens where nobody finds it, or not at all, so
//	        that the kernel refuses
type claim struct {
	outlet  *outlet
	socket  *socket       // nil while there is none
	does    policy.Action // what the socket does
	fault   fault         // why there is none
	problem error         // the same in the kernel's words
	told    fault         // the fault that is in the log
	counted holding       // what the shares hold of it
}

// fault is why a destination cannot be claimed.
type fault uint8

const (
	noFault     fault = iota
	portTaken         // another program holds it
	noRoom            // the limit of claims is reached, or descriptors or memory ran out
	noPrivilege       // a port below net.ipv4.ip_unprivileged_port_start
	otherFault        // the kernel knows why
)

// faultOf gives what an error of claim.open means.
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

// claim makes the socket of a claim, and has it do at once what it is for.
func (m *Manager) claim(c *claim) error {
	if c.outlet.dst.Protocol == service.UDP {
		return m.claimDatagrams(c)
	}
	s, err := m.openClaim(c, m.leaving.at(c.outlet.dst))
	if err != nil {
		return err
	}
	if c.outlet.action == policy.Refuse {
		if errno := sys.StopListening(s.fd); errno != 0 {
			sys.Close(s.fd)
			return errno
		}
		s.hidden, s.stopped = true, true
	} else {
		m.join(s)
	}
	c.socket, c.does, c.fault, c.problem = s, c.outlet.action, noFault, nil
	m.account(c)
	return nil
}

// openClaim makes a listening socket for a claim, with the filter that it is to
// have, in the place of other ones of ours, if there are any.
func (m *Manager) openClaim(c *claim, old []*socket) (*socket, error) {
	o := m.config.listenOptions()
	// The address may be in the making (IPv6 looks whether it is anybody
	// else's first), or go and come back.
	o.FreeBind = true
	o.Transparent = m.traits.BindEach && !c.outlet.own
	if c.outlet.guard != nil || c.outlet.action != policy.Accept {
		o.Filter = nobody
	}
	at := netip.AddrPortFrom(c.outlet.dst.Addr, c.outlet.dst.Port)
	var s *socket
	var err error
	if len(old) == 0 {
		s, err = listen(at, o)
	} else {
		s, err = listenInPlaceOf(old, at, o)
	}
	if err == nil && c.outlet.action == policy.Accept {
		m.protect(s, c.outlet.guards())
	}
	return s, err
}

// become has a claim's socket do what its outlet says. From refusing there is
// no way back: another socket takes its place.
func (m *Manager) become(c *claim) error {
	if c.outlet.dst.Protocol == service.UDP {
		return m.becomeDatagrams(c)
	}
	s, was, is := c.socket, c.does, c.outlet.action
	switch {
	case is == policy.Refuse:
		if was != policy.Refuse {
			if err := m.hide(s); err != nil {
				return err
			}
		}
	case was == policy.Refuse:
		again, err := m.openClaim(c, append(m.leaving.at(c.outlet.dst), s))
		if err != nil {
			return err
		}
		m.join(again)
		m.retire(s, c.outlet.dst)
		c.socket = again
	case is == policy.Drop:
		if errno := s.filter(sockfilter.NoOpenings); errno != 0 {
			return errno
		}
		m.leftOpen(s, 0)
		m.silenced = append(m.silenced, silenced{c, s, m.clock() + int64(lateTime)})
	case is == policy.Accept:
		m.protect(s, c.outlet.guards())
	}
	c.does = is
	return nil
}

// hide has a socket refuse new connections. Those that have begun go on, where
// the kernel can do that.
func (m *Manager) hide(s *socket) error {
	if s.hidden {
		return nil
	}
	if sys.Hide(s.fd) != 0 {
		if errno := sys.StopListening(s.fd); errno != 0 {
			return errno
		}
		m.leave(s, nil)
		s.stopped = true
	}
	s.hidden = true
	return nil
}

// unclaim closes a claim's socket. Established connections go on (A8.7).
func (m *Manager) unclaim(c *claim) {
	if c.outlet.dst.Protocol == service.UDP {
		m.unclaimDatagrams(c)
		return
	}
	s := c.socket
	c.socket = nil
	m.account(c)
	if m.hide(s) != nil {
		sys.LetGo(s.fd)
	}
	m.retire(s, c.outlet.dst)
}
