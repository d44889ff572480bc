package node

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/flow"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/host/tracking"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/service"
)

// flows are the kernel's data path, with an event loop of its own.
type flows struct {
	loop   *poll.Loop
	server *flow.Server
	paths  []listener.Flows // of the protocols that the kernel forwards
}

// goBefore has the kernel forward a protocol, in front of its relay.
func (f *flows) goBefore(protocols map[service.Protocol]listener.Protocol, protocol service.Protocol, relay flow.Relay) {
	path := f.server.Over(relay, protocol)
	f.paths = append(f.paths, path)
	served := protocols[protocol]
	served.Ports = path
	if lacks := served.Available; lacks != nil {
		served.Available = func() error {
			if err := lacks(); err != nil {
				return fmt.Errorf("clients on this node itself, and others that would be relayed, as %w; kernel flows serve all others", err)
			}
			return nil
		}
	}
	protocols[protocol] = served
}

// The default of --max-flows is kube-proxy's rule for connection tracking (--conntrack-max-per-core,
// --conntrack-min), in at most a part of the memory: the kernel has that for flows from the start.
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

// dataPathHere returns why all connections are relayed, or nil. It is an error if
// --datapath asks for the kernel, which cannot.
func (o *Config) dataPathHere() (why, err error) {
	if o.relaysAll() {
		return errors.New("--datapath says so"), o.endFlows()
	}
	return nil, nil
}

// openFlows puts the kernel's data path in front of the relays.
func (p *Proxy) openFlows(logging datagram.Logging, protocols map[service.Protocol]listener.Protocol) error {
	o := &p.config
	tcp := o.Stream.MaxConnections == 0 && o.Stream.MaxServiceConnections == 0 && o.Stream.MaxNamespaceConnections == 0
	udp := o.Datagram.MaxSessions == 0 && o.Datagram.MaxServiceSessions == 0
	if !tcp && !udp {
		return errors.New("the limits of connections and UDP sessions that flags set are the relay's")
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
		Waits:             o.DataPath == AutoPath,
		IdleTimeout:       o.Relay.IdleTimeout,
		HalfClosedTimeout: o.Relay.HalfClosedTimeout,
		UDPTimeout:        o.Datagram.Timeout,
		UDPStreamTimeout:  o.Datagram.StreamTimeout,
		WantsUDP:          logging.Wants,
		Logger:            p.log,
	})
	if err != nil {
		loop.Stop()
		return err
	}
	if err := server.Try(); err != nil {
		server.Close()
		loop.Stop()
		return err
	}
	p.flows = &flows{loop: loop, server: server}
	if tcp {
		p.flows.goBefore(protocols, service.TCP, p.stream)
		if bpf.ServesSCTP() {
			p.flows.goBefore(protocols, service.SCTP, p.stream.SCTP())
		} else {
			p.log.Info().Msg("SCTP is relayed: kernel flows of SCTP take Linux 6.4")
		}
	} else {
		p.log.Info().Msg("TCP and SCTP are relayed: limits of connections that flags set are the relay's")
	}
	if udp {
		p.flows.goBefore(protocols, service.UDP, p.datagram)
	} else {
		p.log.Info().Msg("UDP is relayed: limits of UDP sessions that flags set are the relay's")
	}
	return nil
}

// relaysAll reports whether the kernel is to forward nothing.
func (o *Config) relaysAll() bool { return o.DataPath == RelayPath || o.DataPath == "" }

// endFlows removes what a process with another --datapath left: nobody would follow its
// connections.
func (o *Config) endFlows() error {
	_, err := flow.Cleanup(o.Steering.BPFRoot, o.Steering.Table, 0)
	return err
}

// changed tells that the node forwards other packets than before. f may be nil.
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
