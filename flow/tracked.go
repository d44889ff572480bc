package flow

import (
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/host/tracking"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// trackedTCP is how long connection tracking keeps a quiet connection after it left the shortcuts:
// as long as under kube-proxy. The next packet sets the node's own timeout.
const trackedTCP = 24 * time.Hour

// leaveShortcuts ends all shortcuts. If a rule decides by connection state, or may translate sources, it first
// enters the open connections into connection tracking, which has seen none of their packets and would take them
// for new, or only the client's SYN and would take them for invalid. Those that open from now on take no
// shortcuts. It does not wait for that: shortcuts end by themselves after shortcutsLast.
func (s *Server) leaveShortcuts(end func()) {
	if !s.options.Loop.Post(func() {
		s.worker.readNotices()
		open := s.worker.tracked()
		s.tracking.Go(func() {
			if err := s.know(open); err != nil {
				s.log.Warn().Err(err).Msg("kernel flows: rules take open connections for new ones")
			}
			end()
		})
	}) {
		end()
	}
}

// know enters connections into connection tracking, if a rule decides by their state, or may translate new ones.
func (s *Server) know(open []tracking.Connection) error {
	if len(open) == 0 {
		return nil
	}
	chain, err := firewall.StateRule(s.options.Namespace, s.options.Name)
	if chain == "" && err == nil {
		chain, err = firewall.Translation(s.options.Namespace, s.options.Name)
	}
	if chain == "" || err != nil {
		return err
	}
	if err := sys.InNetNS(s.options.Namespace, func() error { return tracking.Know(open) }); err != nil {
		return err
	}
	s.log.Info().Str("chain", chain).Int("connections", len(open)).Msg("kernel flows: connection tracking now knows the open connections, as a chain needs it")
	return nil
}

// tracked returns the open TCP and UDP flows with the addresses that forwarded packets have.
func (w *worker) tracked() (open []tracking.Connection) {
	for _, f := range w.flows {
		if f == nil || f.state() != bpf.KernelStateOPEN || f.isOfNode() {
			continue
		}
		k := f.shared()
		c := tracking.Connection{Protocol: k.Protocol, Client: bpf.PortOf(k.Client, k.MiddlePort), Server: bpf.PortOf(k.Endpoint, k.EndpointPort), Timeout: trackedTCP}
		switch k.Protocol {
		case syscall.IPPROTO_UDP:
			c.Timeout = w.server.options.UDPTimeout
		case syscall.IPPROTO_TCP:
		default:
			continue
		}
		open = append(open, c)
	}
	return open
}
