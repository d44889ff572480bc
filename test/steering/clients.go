package steering

import (
	"net/netip"
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/must"
)

// HoldClients has answers to addresses come back until the test ends.
func HoldClients(t testing.TB, r redirect.Redirector, clients ...netip.Addr) {
	t.Helper()
	held := r.Traits().Replies.Clients
	if held == nil {
		return
	}
	for _, c := range clients {
		must.OK(t, must.Err(held.Hold(c)))
		t.Cleanup(func() { held.Release(c) })
	}
}

// Counted is a Redirector that counts the sockets for which it holds clients.
type Counted struct {
	redirect.Redirector
	Held, Open atomic.Int64 // in total, and now
}

// Traits are those of the Redirector, with clients that are counted.
func (c *Counted) Traits() redirect.Traits {
	t := c.Redirector.Traits()
	if t.Replies.Clients != nil {
		t.Replies.Clients = &countedClients{t.Replies.Clients, c}
	}
	return t
}

type countedClients struct {
	redirect.Clients
	count *Counted
}

func (c *countedClients) Hold(client netip.Addr) ([2]uint16, error) {
	ports, err := c.Clients.Hold(client)
	if err == nil {
		c.count.Held.Add(1)
		c.count.Open.Add(1)
	}
	return ports, err
}

func (c *countedClients) Release(client netip.Addr) {
	c.Clients.Release(client)
	c.count.Open.Add(-1)
}
