package node

import (
	"context"
	"maps"
	"math"
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

// departed ends connections to endpoints that went or stopped serving, once the time of
// their Service's annotation sluice.dev/drain has passed. UDP sessions end at once (A8.2).
// It belongs to Run's goroutine.
type departed struct {
	seen  *service.Snapshot // the last one
	ports map[service.PortName]*departures
	timer *time.Timer
}

// departures are those of one service port with the annotation.
type departures struct {
	port *service.Port
	// since is when the port got the annotation or the process began: endpoints that do not serve
	// and are not in left count as gone then. It is zero once their time has passed.
	since time.Time
	left  map[netip.AddrPort]time.Time // endpoints that stopped serving
	end   time.Time                    // of the earliest time that is not over; zero if all are
}

// mostLeft bounds departures.left. If more endpoints go, all those that do not serve count as
// gone with the last one.
const mostLeft = 4096

// departedPause lets departures of the same moment be handled together.
const departedPause = 50 * time.Millisecond

func newDeparted() *departed {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return &departed{seen: &service.Snapshot{}, ports: make(map[service.PortName]*departures), timer: t}
}

// update notes which endpoints have stopped serving with a snapshot.
func (d *departed) update(snap *service.Snapshot, now time.Time) {
	for i, is := range snap.Ports {
		if is != nil && is != d.seen.Port(i) {
			d.updatePort(is, now)
		}
	}
	for i, was := range d.seen.Ports {
		if was == nil || was == snap.Port(i) {
			continue
		}
		if p := d.ports[was.Name]; p != nil && p.port == was { // no port has its name any more
			delete(d.ports, was.Name)
		}
	}
	d.seen = snap
	d.schedule()
}

func (d *departed) updatePort(is *service.Port, now time.Time) {
	p := d.ports[is.Name]
	if is.Drain == 0 {
		delete(d.ports, is.Name)
		return
	}
	if p == nil {
		p = &departures{port: is, since: now, left: make(map[netip.AddrPort]time.Time)}
		d.ports[is.Name] = p
	}
	before, after := serving(p.port), serving(is)
	p.port = is
	for a := range before {
		if _, still := after[a]; !still {
			p.left[a] = now
		}
	}
	maps.DeleteFunc(p.left, func(a netip.AddrPort, _ time.Time) bool { _, again := after[a]; return again })
	if len(p.left) > mostLeft {
		clear(p.left)
		p.since = now
	}
	p.findEnd()
}

// findEnd notes the earliest end.
func (p *departures) findEnd() {
	p.end = time.Time{}
	for _, at := range p.left {
		if p.end.IsZero() || at.Before(p.end) {
			p.end = at
		}
	}
	if !p.since.IsZero() && (p.end.IsZero() || p.since.Before(p.end)) {
		p.end = p.since
	}
	if !p.end.IsZero() {
		p.end = p.end.Add(p.port.Drain)
	}
}

// restart counts endpoints that do not serve as gone now, if their time has passed: connections of
// an earlier process to them have become known only now.
func (d *departed) restart(now time.Time) {
	for _, p := range d.ports {
		if p.since.IsZero() {
			p.since = now
			p.findEnd()
		}
	}
	d.schedule()
}

// serving returns the endpoints to which open connections may stay.
func serving(p *service.Port) map[netip.AddrPort]struct{} {
	all := make(map[netip.AddrPort]struct{})
	for f := range p.Families {
		for i := range p.Families[f].Endpoints {
			if e := &p.Families[f].Endpoints[i]; e.Serving || e.Ready {
				all[e.Addr] = struct{}{}
			}
		}
	}
	return all
}

// schedule sets the timer to the earliest end.
func (d *departed) schedule() {
	var next time.Time
	for _, p := range d.ports {
		if !p.end.IsZero() && (next.IsZero() || p.end.Before(next)) {
			next = p.end
		}
	}
	if d.timer.Stop(); !next.IsZero() {
		d.timer.Reset(max(time.Until(next), 0) + departedPause)
	}
}

// overdue identifies the connections of a service port whose time is over. It is immutable.
type overdue struct {
	left  map[netip.AddrPort]struct{} // of these endpoints
	stays map[netip.AddrPort]struct{} // if not nil: also of all others than these
}

func (o *overdue) has(endpoint netip.AddrPort) bool {
	if _, is := o.left[endpoint]; is || o.stays == nil {
		return is
	}
	_, stays := o.stays[endpoint]
	return !stays
}

// take removes and returns what is overdue.
func (d *departed) take(now time.Time) map[service.PortName]*overdue {
	all := make(map[service.PortName]*overdue)
	for name, p := range d.ports {
		if p.end.IsZero() || now.Before(p.end) {
			continue
		}
		o := &overdue{left: make(map[netip.AddrPort]struct{})}
		for a, at := range p.left {
			if !now.Before(at.Add(p.port.Drain)) {
				o.left[a] = struct{}{}
				delete(p.left, a)
			}
		}
		if !p.since.IsZero() && !now.Before(p.since.Add(p.port.Drain)) {
			p.since = time.Time{}
			o.stays = serving(p.port)
			for a := range p.left {
				o.stays[a] = struct{}{}
			}
		}
		all[name] = o
		p.findEnd()
	}
	d.schedule()
	return all
}

// endDeparted resets the connections that are overdue.
func (p *Proxy) endDeparted(ctx context.Context, all map[service.PortName]*overdue) {
	ended, err := p.conntrack.EndWhere(ctx, p.onLoops(), math.MaxInt, conntrack.Drained, func(r *conntrack.Record) bool {
		if !r.Connected || r.Port == nil {
			return false
		}
		o := all[r.Port.Name]
		return o != nil && o.has(r.Endpoint.Addr)
	})
	if ended > 0 {
		p.log.Info().Int("connections", ended).Msg("connections to endpoints that no longer serve were reset (sluice.dev/drain)")
	}
	if err != nil && ctx.Err() == nil {
		p.log.Warn().Err(err).Msg("connections to endpoints that no longer serve are not reset")
	}
}
