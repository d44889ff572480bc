package node

import "github.com/sluice-proxy/sluice/handover"

// stop ends what run has started, in an order in which no client has to wait: first
// SCTP, whose ABORTs need the routes, then steering, then connections, then the records
// are written.
func (p *Proxy) stop() {
	dropped := p.conntrack.Stats().Dropped
	if b := p.before; b != nil && b.serving {
		b.conn.StopTaking()
		<-b.left // what has come is among the connections that end below
	}
	if p.takesOver() && !p.left { // it ends before it has its configuration
		p.leave()
	}
	p.within(stopPatience, "associations are cut without an ABORT", p.stream.SCTP().End)
	if !p.left {
		if err := p.steer.Close(); err != nil {
			p.log.Error().Err(err).Msg("steering is not undone; sluice cleanup does it")
		}
		if p.flows != nil {
			p.within(flowsPatience, "forwarded connections are cut without a reset or a record", p.flows.stop)
		}
	}
	p.within(stopPatience, "connections are cut without a record", p.manager.Stop)
	p.within(stopPatience, "records are lost", p.conntrack.Close)
	if n := p.conntrack.Stats().Dropped - dropped; n > 0 {
		p.log.Error().Uint64("records_lost", n).Msg("the access log was too slow for the last records")
	}
}

// closeRest closes what openRest has opened, the health checks, and the lock.
func (p *Proxy) closeRest() {
	if p.health != nil {
		p.health.Close()
	}
	if p.admin != nil {
		p.admin.Close()
	}
	if p.page != nil {
		p.page.Close()
	}
	p.names.close()
	if p.offer != nil {
		p.offer.Close()
	}
	if p.lock != nil && p.left {
		_ = p.lock.Release() // the next process has it too
	}
}

// close releases what New has opened.
func (p *Proxy) close() {
	p.closeRest()
	if p.health != nil {
		p.health.Wait()
	}
	if p.hostWatcher != nil {
		p.hostWatcher.Close()
	}
	if p.past != nil {
		p.past.Close()
	}
	for _, l := range p.loops {
		l.Poll.Stop()
		l.Relay.Close()
	}
	if p.flows != nil {
		p.flows.close()
	}
	p.drops.Close()
	if p.accessLog != nil {
		if err := p.accessLog.Close(); err != nil {
			p.log.Error().Err(err).Msg("access log")
		}
	}
	if p.lock != nil {
		_ = p.lock.Release() // the process ends, and the lock with it
	}
	if p.successor != nil {
		p.moves = false
		_, _ = p.tellPorts(p.successor), p.tellPast() // of connections that stayed here; it may be gone
	}
	for _, c := range []*handover.Conn{p.waiting, p.successor} {
		if c != nil {
			_ = c.Close()
		}
	}
}
