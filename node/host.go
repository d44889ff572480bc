package node

import (
	"errors"
	"slices"

	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/host/tracking"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// openHost opens the watcher of this node's network stack and reads the first state.
func (p *Proxy) openHost() error {
	watcher, err := hostnet.Open(hostnet.Options{Pods: p.config.PodInterfaces, Logger: p.log})
	if err != nil {
		return err
	}
	p.hostWatcher = watcher
	state, err := watcher.Read()
	if err != nil {
		return err
	}
	p.setHost(state)
	if p.config.PodInterfaces != nil && len(state.PodRanges) == 0 {
		p.log.Warn().Msg("no address is routed to an interface of pods yet: until one is, no client counts as a pod of this node")
	}
	return nil
}

// setHost stores this node's addresses and pods.
func (p *Proxy) setHost(s hostnet.State) {
	p.host.Store(&s)
	drained := p.policy.Drained
	p.policy = p.config.Policy
	p.policy.NodeAddresses, p.policy.PodRanges, p.policy.Drained = s.Addresses, s.PodRanges, drained
	p.setNode()
	// The next snapshot contains it.
	p.store.Apply(service.Change{Host: &service.Host{Addresses: slices.Concat(s.Addresses, p.config.Policy.NodeIPs), Broadcasts: s.Broadcasts}})
}

// setNode sets in the table of connections which clients are this node.
func (p *Proxy) setNode() {
	if p.conntrack != nil {
		p.conntrack.SetNode(p.config.Policy.NodeName, p.host.Load().Addresses)
	}
}

// hostChanged applies changed addresses and pods of this node (A4.4, A4.6).
func (p *Proxy) hostChanged(s hostnet.State) {
	p.setHost(s)
	p.log.Debug().Int("addresses", len(s.Addresses)).Int("pod_ranges", len(s.PodRanges)).Msg("this node's addresses or pods have changed")
	if p.table != nil { // else the first configuration takes them
		p.reportProblems(p.store.Snapshot())
		p.enforce(p.store.Snapshot())
	}
}

// logForwardPolicies logs rules for forwarded packets once: they do not see
// packets to Services, although their author may expect that.
func (p *Proxy) logForwardPolicies() {
	found, err := firewall.ForwardPolicies(0)
	if err != nil {
		p.log.Debug().Err(err).Msg("rules for forwarded packets are not known")
	}
	if len(found) > 0 {
		p.log.Warn().Strs("rules", found).Msg("these rules for forwarded packets do not see what clients send through Services, as it leaves from this node: have network policies judge packets where they leave pods or reach them")
	}
}

// logTracking logs once that connections to endpoints are kept in connection tracking,
// and why, or that --conntrack asks for what the steering mode cannot do.
func (p *Proxy) logTracking() {
	if p.keptTold {
		return
	}
	traits := p.steer.Traits()
	if traits.Replies.Tracking == nil {
		p.keptTold = true
		if asked := p.config.Steering.Conntrack; asked == redirect.Bypass {
			p.log.Warn().Str("redirect", traits.Name).Msg("--conntrack=" + string(asked) + " has no effect: in this mode, connections to endpoints do not bypass connection tracking")
		}
		return
	}
	if why, kept := traits.Replies.Tracking.Kept(); kept {
		p.keptTold = true
		p.log.Info().Str("because", why).Msg("connections to endpoints are kept in connection tracking")
	}
}

// setConntrack makes kube-proxy's settings in its place, as far as that is allowed:
// a container that is not privileged may only set timeouts. Where nothing tracks
// connections yet, maintain tries again.
func (p *Proxy) setConntrack() {
	set, problems := p.config.Tracking.Apply(tracking.Host())
	p.trackingLater = slices.Contains(problems, tracking.ErrNotLoaded)
	if len(set) > 0 {
		p.log.Info().Strs("sysctls", set).Msg("connection tracking is set as kube-proxy sets it")
	}
	for _, problem := range problems {
		if errors.Is(problem, tracking.ErrNotLoaded) {
			p.log.Debug().Err(problem).Msg("connection tracking will be set as kube-proxy sets it")
			continue
		}
		p.log.Warn().Err(problem).Msg("connection tracking is not set as kube-proxy sets it; hostPorts and masqueraded traffic depend on it: set it on the node")
	}
}
