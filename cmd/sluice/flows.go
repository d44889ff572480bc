package main

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/flow"
	"github.com/sluice-proxy/sluice/internal/hostnet"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/service"
)

// The values of --datapath.
const (
	pathAuto   = "auto"
	pathKernel = "kernel"
	pathRelay  = "relay"
)

// flows are the kernel's data path, with an event loop of its own.
type flows struct {
	loop   *poll.Loop
	server *flow.Server
}

// dataPathHere returns why all connections are relayed, or nil. It is an error if
// --datapath asks for the kernel, which cannot.
func (o *runOptions) dataPathHere() (why, err error) {
	if o.dataPath.value == pathRelay {
		return errors.New("--datapath says so"), o.endFlows()
	}
	if err := flow.Try(); err != nil {
		if o.dataPath.value == pathKernel {
			return nil, fmt.Errorf("--datapath kernel: %w", err)
		}
		return err, nil
	}
	return nil, nil
}

// openFlows puts the kernel's data path in front of the relays.
func (p *proxy) openFlows(logging datagram.Logging, transports map[service.Protocol]listener.Transport) error {
	o := p.options
	tcp := o.stream.MaxConnections == 0 && o.stream.MaxServiceConnections == 0 && o.stream.MaxNamespaceConnections == 0
	udp := o.datagram.MaxSessions == 0 && o.datagram.MaxServiceSessions == 0
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
	server, err := flow.New(flow.Options{
		MaxFlows:          o.maxFlows,
		BPFRoot:           o.steering.bpfRoot,
		Name:              o.steering.table,
		Keep:              o.keepFlows.value == "always" || o.keepFlows.value == pathAuto && p.cluster != nil,
		Loop:              loop,
		Shard:             p.conntrack.Shard(o.workers),
		Table:             p.conntrack,
		SameLink:          func(a, b netip.Addr) bool { return p.host.Load().SameLink(a, b) },
		Links:             func() []hostnet.Link { return p.host.Load().Links() },
		ReplyPorts:        ports,
		Shortcuts:         o.shortcuts.value == "auto",
		IdleTimeout:       o.relay.IdleTimeout,
		HalfClosedTimeout: o.relay.HalfClosedTimeout,
		UDPTimeout:        o.datagram.Timeout,
		UDPStreamTimeout:  o.datagram.StreamTimeout,
		WantsUDP:          logging.Wants,
		Logger:            p.log,
	})
	if err != nil {
		loop.Stop()
		return err
	}
	p.flows = &flows{loop: loop, server: server}
	if tcp {
		transports[service.TCP] = server.Over(p.stream, service.TCP)
		if flow.ServesSCTP() {
			transports[service.SCTP] = server.Over(p.stream.SCTP(), service.SCTP)
		} else {
			p.log.Info().Msg("SCTP is relayed: kernel flows of SCTP take Linux 6.4")
		}
	} else {
		p.log.Info().Msg("TCP and SCTP are relayed: limits of connections that flags set are the relay's")
	}
	if udp {
		transports[service.UDP] = server.Over(p.datagram, service.UDP)
	} else {
		p.log.Info().Msg("UDP is relayed: limits of UDP sessions that flags set are the relay's")
	}
	return nil
}

// endFlows removes what a process with another --datapath left: nobody would follow its
// connections.
func (o *runOptions) endFlows() error {
	_, err := flow.Cleanup(o.steering.bpfRoot, o.steering.table, 0)
	return err
}

func (f *flows) close() {
	f.loop.Stop()
	f.server.Close()
}
