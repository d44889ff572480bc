package mode

import (
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/redirect"
)

// replyLinger is how long replies are brought back after the last socket on a client's
// address was closed. It covers the FIN_WAIT and TIME_WAIT of that socket.
const replyLinger = 2 * time.Minute

// Demand adds what brings replies back to clients' addresses when the first socket needs
// it, and removes it two minutes after the last one was closed. Every packet that the
// node forwards pays for it: for a policy routing rule, and for a look at its port. A node
// whose Services are served by kernel flows has no such socket for most of the time.
//
// A mode sets it as Core.Demand, and gives it out as [redirect.Replies].Clients. Its
// methods are safe for concurrent use.
type Demand struct {
	core   *Core
	ports  [2]uint16
	put    func(redirect.Plan) error // puts the plan in force again, with replies or without
	linger time.Duration

	sockets atomic.Int64 // on clients' addresses now
	used    atomic.Bool  // there was one since the last Verify
	ready   atomic.Bool  // replies come back

	// Guarded by the Core's lock:
	allowed bool      // by the plan
	wanted  bool      // by a socket
	unused  time.Time // since when no socket has been closed; zero if that is not known
	failed  error     // of the last try
}

var (
	_ redirect.Clients = (*Demand)(nil)

	errNothingSteered = errors.New("nothing is steered yet")
)

// NewDemand makes a Demand for sockets whose ports are from the range of answers. A mode
// puts the plan in force again by put, which differs in Plan.NodeSourceOnly alone.
func NewDemand(c *Core, answers redirect.Replies, put func(redirect.Plan) error) *Demand {
	return &Demand{core: c, ports: [2]uint16{answers.FirstPort, answers.LastPort}, put: put, linger: replyLinger}
}

// Hold puts the rules in force for the first socket; that one waits for the kernel,
// and for an Apply that is under way. The others pay for two atomic operations. An error
// is that of the first try since the last Verify.
func (d *Demand) Hold(netip.Addr) (ports [2]uint16, err error) {
	d.sockets.Add(1)
	if !d.ready.Load() {
		if err := d.begin(); err != nil {
			d.sockets.Add(-1)
			return ports, err
		}
	}
	return d.ports, nil
}

// Release is called after such a socket was closed.
func (d *Demand) Release(netip.Addr) {
	d.used.Store(true)
	d.sockets.Add(-1)
}

// Held returns an address that stands for all, if replies come back: they do so for all
// clients or for none.
func (d *Demand) Held() []netip.Addr {
	if !d.ready.Load() {
		return nil
	}
	return []netip.Addr{netip.IPv4Unspecified()}
}

// Expect brings replies back from the first Apply on, if the process before held any address.
func (d *Demand) Expect(held []netip.Addr) error {
	d.core.mu.Lock()
	defer d.core.mu.Unlock()
	d.sockets.Add(int64(len(held)))
	d.wanted = d.wanted || len(held) > 0
	return nil
}

// prepare removes the replies from a plan for as long as no socket needs them.
func (d *Demand) prepare(p *redirect.Plan) {
	d.allowed = !p.NodeSourceOnly
	p.NodeSourceOnly = !d.allowed || !d.wanted
}

func (d *Demand) begin() error {
	d.core.mu.Lock()
	defer d.core.mu.Unlock()
	switch {
	case d.core.steps == nil:
		return ErrClosed
	case !d.core.applied:
		return errNothingSteered
	case d.failed != nil || d.ready.Load():
		return d.failed
	}
	d.wanted = true
	return d.again()
}

// again makes the plan in force one with replies, or without.
func (d *Demand) again() error {
	p := d.core.Plan
	p.NodeSourceOnly = !d.allowed || !d.wanted
	d.failed = d.put(p)
	d.ready.Store(d.wanted && d.failed == nil)
	return d.failed
}

// follow is a part of Verify. It tries again what failed, and ends what has not been
// needed for long.
func (d *Demand) follow() error {
	used := d.used.Swap(false)
	switch {
	case d.failed != nil:
		return d.again()
	case !d.wanted:
		return nil
	case used:
		d.unused = time.Time{}
		return nil
	case d.unused.IsZero():
		d.unused = time.Now()
	}
	if time.Since(d.unused) < d.linger {
		return nil
	}
	// A Hold either sees that replies are not ready, and waits for our lock, or is seen
	// here.
	d.unused = time.Time{}
	d.ready.Store(false)
	if d.sockets.Load() > 0 {
		d.ready.Store(true)
		return nil
	}
	d.wanted = false
	return d.again()
}
