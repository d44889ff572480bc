package listener

import (
	"fmt"
	"net/netip"

	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// newDatagrams makes what serves UDP on the Manager's loops.
func newDatagrams(m *Manager, o *Options) *datagram.Server {
	config := o.UDP
	config.Algorithm, config.Plan, config.MaxPins = o.Algorithm, o.Plan, o.MaxPins
	config.MaxLanes = m.config.MaxLanes
	traits := o.Redirector.Traits()
	if most := traits.MaxLanes; most > 0 {
		config.MaxLanes = min(config.MaxLanes, most)
	}
	var loops []*poll.Loop
	for _, l := range o.Loops {
		loops = append(loops, l.Poll)
	}
	return datagram.New(datagram.Options{
		Config:     config,
		Loops:      loops,
		Table:      o.Table,
		Replies:    traits.Replies,
		PastMark:   traits.PastMark,
		OwnAddress: func(a netip.Addr) bool { return m.state.Load().host.has(a) },
		SameLink:   m.sameLink,
		Logger:     o.Logger,
	})
}

// openDatagramLane gives an outlet the sockets that its datagrams are steered
// to.
func (m *Manager) openDatagramLane(o *outlet) error {
	target, err := m.datagrams.Lane(o.name, service.FamilyOf(o.dst.Addr))
	if err != nil {
		return fmt.Errorf("service %s: %w", o.name, err)
	}
	o.target = target
	return nil
}

// claimDatagrams is claim for UDP: sockets are bound to the destination while it
// is accepted or silent. Who may not come in is passed over by the verdict on
// each datagram. While it refuses there is no socket, or the kernel would not.
func (m *Manager) claimDatagrams(c *claim) error {
	if err := m.becomeDatagrams(c); err != nil {
		return err
	}
	c.socket, c.fault, c.problem = &socket{fd: -1}, noFault, nil
	m.account(c)
	return nil
}

// becomeDatagrams is become for UDP.
func (m *Manager) becomeDatagrams(c *claim) error {
	if c.outlet.action == policy.Refuse {
		m.datagrams.Unbind(c.outlet.dst)
	} else if err := m.datagrams.Bind(c.outlet.dst); err != nil {
		return err
	}
	c.does = c.outlet.action
	return nil
}

// unclaimDatagrams is unclaim for UDP.
func (m *Manager) unclaimDatagrams(c *claim) {
	c.socket = nil
	m.account(c)
	m.datagrams.Unbind(c.outlet.dst)
}

// Datagrams gives what was counted of UDP.
func (m *Manager) Datagrams() datagram.Stats { return m.datagrams.Stats() }
