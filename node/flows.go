package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/flow"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/host/tracking"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/service"
)

// flows are the kernel's data path, with an event loop of its own. The kernel's verifier may
// take seconds until it serves; the relay serves meanwhile.
type flows struct {
	loop    *poll.Loop
	server  *flow.Server
	paths   []listener.Flows // of the protocols that the kernel forwards
	begun   chan error       // has an element once the server has started, or has failed to
	settled bool             // that was received; run's goroutine's
	ended   chan struct{}    // closed when start has ended
}

// goBefore puts kernel flows of a protocol in front of its relay.
func (f *flows) goBefore(protocols map[service.Protocol]listener.Protocol, protocol service.Protocol, relay flow.Relay) {
	path := f.server.Over(relay, protocol)
	f.paths = append(f.paths, path)
	served := protocols[protocol]
	served.Ports = path
	if lacks := served.Available; lacks != nil {
		served.Available = func() error {
			err := lacks()
			if err == nil || !f.server.Started() {
				return err
			}
			return fmt.Errorf("clients on this node itself, and others that would be relayed, as %w; kernel flows serve all others", err)
		}
	}
	protocols[protocol] = served
}

// The default of --max-flows is kube-proxy's rule for connection tracking (--conntrack-max-per-core,
// --conntrack-min), in at most a part of the memory, which the kernel allocates at the start.
const (
	flowsPerCPU = 32768
	leastFlows  = 131072
	flowBytes   = 344 // see flow.Options
	flowMemory  = 16  // one part in so many
)

// mostFlows bounds flows by the memory, in bytes; 0: unknown.
func mostFlows(wanted int, memory uint64) int {
	if memory > 0 {
		wanted = min(wanted, int(memory/flowMemory/flowBytes))
	}
	return max(min(wanted, bpf.MostFlows), 1)
}

// dataPath is the one in use, and why it is the relay.
type dataPath struct {
	path conntrack.Path
	why  string
}

// relayAll records why all connections are relayed, and removes what an earlier process left at
// interfaces, because no process would maintain it. It is an error if --datapath demands the
// kernel.
func (p *Proxy) relayAll(why error) error {
	o := &p.config
	if o.DataPath == KernelPath {
		return fmt.Errorf("--datapath kernel: %w", why)
	}
	if p.takesOver() && !o.relaysAll() && p.before.conn.Running().Flows {
		return fmt.Errorf(withoutFlows, why)
	}
	p.hasFlows.Store(false)
	p.dataPath.Store(&dataPath{conntrack.Relayed, why.Error()})
	p.logForwardPolicies()
	removed, err := flow.Cleanup(o.Steering.BPFRoot, o.Steering.Table, 0)
	if p.before != nil && len(removed) > 0 { // the trial has not found out
		p.log.Error().Strs("removed", removed).Msg("the sluice before had kernel flows, and this one has none: forwarded connections are cut")
	}
	if o.relaysAll() {
		return err
	}
	p.log.Info().Str("because", why.Error()).AnErr("leftovers", err).Msg("all connections are relayed")
	return nil
}

// withoutFlows is the error of a process that ends its take-over because it cannot adopt the
// running one's kernel flows, and would cut them.
const withoutFlows = "the running sluice has kernel flows and serves on: this one cannot have them: %w; --datapath relay begins once that one has ended, and cuts its connections"

// openFlows puts the kernel's data path in front of the relays. It returns why that cannot be.
func (p *Proxy) openFlows(logging datagram.Logging, protocols map[service.Protocol]listener.Protocol) error {
	o := &p.config
	if o.relaysAll() {
		return errors.New("--datapath says so")
	}
	loop, err := poll.New()
	if err != nil {
		return err
	}
	replies := p.steer.Traits().Replies
	var ports [2]uint16
	if replies.Clients != nil {
		ports = [2]uint16{replies.FirstPort, replies.LastPort}
	}
	o.MaxFlows = cmp.Or(o.MaxFlows, mostFlows(tracking.MaxFor(flowsPerCPU, leastFlows), sys.Memory()))
	server, err := flow.New(flow.Options{
		MaxFlows:          o.MaxFlows,
		BPFRoot:           o.Steering.BPFRoot,
		Name:              o.Steering.Table,
		Keep:              o.KeepFlows,
		Loop:              loop,
		Shard:             p.conntrack.Shard(o.Workers),
		Table:             p.conntrack,
		SameLink:          func(a, b netip.Addr) bool { return p.host.Load().SameLink(a, b) },
		Links:             func() []hostnet.Link { return p.host.Load().Links() },
		ReplyPorts:        ports,
		Shortcuts:         o.Shortcuts,
		Drops:             p.drops,
		Judges:            new(firewall.Forwarded).Policies,
		Waits:             o.DataPath == AutoPath,
		IdleTimeout:       o.Relay.IdleTimeout,
		HalfClosedTimeout: o.Relay.HalfClosedTimeout,
		UDPTimeout:        o.Datagram.Timeout,
		UDPStreamTimeout:  o.Datagram.StreamTimeout,
		Relayed:           p.relayedSessions,
		Counted:           p.before != nil,
		WantsUDP:          logging.Wants,
		Dropped:           p.refusals.dropped,
		NotAdmitted:       p.refusals.notAdmitted,
		Logger:            p.log,
	})
	if err != nil {
		loop.Stop()
		return err
	}
	p.flows = &flows{loop: loop, server: server, begun: make(chan error, 1), ended: make(chan struct{})}
	p.hasFlows.Store(true)
	p.dataPath.Store(&dataPath{conntrack.Relayed, "the BPF programs of kernel flows are being loaded"})
	p.flows.goBefore(protocols, service.TCP, p.stream)
	if bpf.ServesSCTP() {
		p.flows.goBefore(protocols, service.SCTP, p.stream.SCTP())
	} else {
		p.log.Info().Msg("SCTP is relayed: kernel flows of SCTP take Linux 6.4")
	}
	p.flows.goBefore(protocols, service.UDP, p.datagram)
	return nil
}

// relaysAll reports whether the kernel is to forward nothing.
func (o *Config) relaysAll() bool { return o.DataPath == RelayPath || o.DataPath == "" }

// followSession reports the relay's UDP sessions to kernel flows, which leave their datagrams to the
// relay.
func (p *Proxy) followSession(client, vip netip.AddrPort, open bool) {
	if p.flows != nil {
		p.flows.server.Session(client, vip, open)
	}
}

// makeRoom makes kernel flows end a UDP session, so that the relay may begin one.
func (p *Proxy) makeRoom(name service.PortName, end conntrack.End) {
	if p.flows != nil {
		p.flows.server.MakeRoom(name, end)
	}
}

// relayedSessions visits the UDP sessions that are relayed.
func (p *Proxy) relayedSessions(visit func(client, vip netip.AddrPort)) {
	err := p.conntrack.List(context.Background(), p.onLoops(), func(r *conntrack.Record) error {
		if r.Protocol == service.UDP && r.Path == conntrack.Relayed {
			visit(r.Client, r.VIP)
		}
		return nil
	})
	if err != nil {
		p.log.Warn().Err(err).Msg("UDP sessions that are relayed are unknown: their clients may get another endpoint")
	}
}

// slowStart is how long kernel flows may start before the log says so.
const slowStart = 2 * time.Second

// startFlows starts the kernel's data path.
func (p *Proxy) startFlows() {
	f := p.flows
	defer close(f.ended)
	slow := time.AfterFunc(slowStart, func() {
		p.log.Info().Msg("the kernel has not yet verified the BPF programs of kernel flows; all connections are relayed meanwhile")
	})
	defer slow.Stop()
	if gate := p.config.beforeFlows; gate != nil {
		if err := gate(); err != nil {
			f.begun <- err
			return
		}
	}
	f.begun <- f.server.Start()
}

// flowsBegun puts the kernel's data path in force once it has started. If that failed with err, all
// is relayed.
func (p *Proxy) flowsBegun(err error) error {
	p.flows.settled = true
	if err != nil {
		p.flows.server.Close()
		if err := p.relayAll(err); err != nil {
			return err
		}
		p.reportReady()
		return nil
	}
	p.dataPath.Store(&dataPath{path: conntrack.Kernel})
	p.log.Debug().Dur("took", time.Since(p.started)).Msg("kernel flows serve")
	if p.table != nil { // else the first configuration finds them
		p.enforce(p.store.Snapshot())
		p.departed.restart(time.Now())
	}
	return nil
}

// settling reports whether kernel flows are still starting. f may be nil.
func (f *flows) settling() bool { return f != nil && !f.settled }

// hasBegun returns the channel that receives the result of the start. f may be nil.
func (f *flows) hasBegun() <-chan error {
	if f == nil {
		return nil
	}
	return f.begun
}

// stop ends the flows, after the start has ended.
func (f *flows) stop(ctx context.Context) error {
	select {
	case <-f.ended:
		return f.server.Stop(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// handOver leaves the flows to the next process, after the start has ended.
func (f *flows) handOver(ctx context.Context) error {
	select {
	case <-f.ended:
		return f.server.HandOver(ctx)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// changed is flow.Server.Changed. f may be nil.
func (f *flows) changed() <-chan struct{} {
	if f == nil {
		return nil
	}
	return f.server.Changed()
}

func (f *flows) close() {
	f.loop.Stop()
	f.server.Close()
}
