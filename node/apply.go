package node

import (
	"fmt"
	"maps"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
)

// apply applies a change of the configuration.
func (p *Proxy) apply(c service.Change) {
	publish := p.names.apply(c)
	snap := p.store.Apply(c)
	publish(snap)
	if p.table == nil {
		letGo(c)
	}
	if p.table != nil && p.table.Snapshot() == snap {
		return // nothing that matters (A1.17)
	}
	p.reportProblems(snap)
	p.enforce(snap, c.Triggers...)
}

// enforce applies a snapshot with the node's current state. triggers are the times
// at which its changes happened, as far as known.
func (p *Proxy) enforce(snap *service.Snapshot, triggers ...time.Time) {
	if p.left {
		return // Run ends
	}
	begin := time.Now()
	p.node.update(snap)
	if p.rank != nil {
		p.rank.Set(p.config.Policy.NodeName, snap.Node.PodCIDRs, p.policy.ClusterCIDRs)
	}
	prev := p.table
	p.table = policy.Compile(prev, snap, p.policy)
	p.changes.note(prev, p.table, begin)
	p.health.Queued()
	taking, drained := p.takesOver(), p.policy.Drained
	if taking {
		if err := p.takeSockets(); err != nil {
			p.failTakeOver(err)
			return
		}
	}
	err := p.manager.Apply(p.table)
	if taking {
		if err == nil {
			err = p.tookOver()
		}
		if err != nil {
			p.failTakeOver(err)
			return
		}
		if !maps.Equal(drained, p.policy.Drained) {
			p.enforce(snap, triggers...)
			return
		}
	}
	p.health.Update(p.table)
	p.countNoLocal()
	p.departed.update(snap, begin)
	p.rebalancer.update(p.table, p.conntrack, begin)
	if err != nil {
		p.notInForce(err)
		return
	}
	p.inForce()
	p.sync.Applied(begin, time.Now(), triggers)
	p.log.Debug().Dur("took", time.Since(begin)).Int("service_ports", servicePorts(snap)).Msg("configuration in force")
}

// failTakeOver ends Run.
func (p *Proxy) failTakeOver(err error) {
	p.leave()
	select {
	case p.fatal <- fmt.Errorf("take over: %w; the running sluice serves on", err):
	default: // it ends already
	}
}

// inForce records that the last configuration is completely in force.
func (p *Proxy) inForce() {
	if p.config.Applied != nil {
		defer p.config.Applied(p.table.Snapshot())
	}
	p.health.Applied()
	p.trouble.Over()
	p.wrong.Store(nil)
	p.applied.Store(time.Now().UnixNano())
	p.reportReady()
}

// reportReady reports once that Sluice serves: the configuration is completely in force, with the
// data path that it is to have.
func (p *Proxy) reportReady() {
	if p.toldReady || p.applied.Load() == 0 || p.flows.settling() {
		return
	}
	p.toldReady = true
	go p.settleMemory()
	event := p.log.Info().Str("version", p.config.Version).Str("node", p.config.Policy.NodeName).Str("redirect", p.steer.Traits().Name).Stringer("datapath", p.dataPath.Load().path)
	if p.manifests != nil {
		found := p.manifests.Stats()
		event = event.Int("files", found.Files).Int("objects_passed_over", sum(found.PassedOver))
	}
	event.Int("service_ports", servicePorts(p.table.Snapshot())).Msg("ready")
	p.config.Notify(daemon.SdNotifyReady)
	p.events.Send(kubernetes.Event{Reason: "Starting", Action: "StartKubeProxy", Note: "sluice " + p.config.Version + " serves the Services of this node"})
}

// notInForce records that a part of it is not. It logs the same error once only, as
// the retries would fill the log.
func (p *Proxy) notInForce(err error) {
	p.failures.Add(1)
	text := err.Error()
	p.wrong.Store(&text)
	if !p.trouble.New(text) {
		return
	}
	p.log.Error().Err(err).Msg("the kernel's tables are not as they should be; trying again")
}

// countNoLocal counts the service ports that this node drops (A3.16).
func (p *Proxy) countNoLocal() {
	var n admin.NoLocalEndpoints
	for f := range n {
		n[f].Internal, n[f].External = p.table.NoLocalEndpoints(service.Family(f))
	}
	p.noLocal.Store(&n)
}

func (p *Proxy) maintain() {
	defer func() { p.maintained = time.Now() }()
	if p.left {
		return // Run ends
	}
	if p.trackingLater {
		p.setConntrack()
	}
	complete := p.manager.Complete()
	repaired, err := p.manager.Maintain()
	if err != nil {
		p.notInForce(err)
		return
	}
	if !complete || p.trouble.Lasts() {
		p.inForce()
	}
	p.logTracking()
	if repaired {
		p.repairs.Add(1)
		p.log.Warn().Msg("somebody had changed our part of the kernel's tables; it is restored")
	}
}

// nextMaintenance is shorter while something is not in force.
func (p *Proxy) nextMaintenance() time.Duration {
	if p.trouble.Lasts() {
		return min(retryTrouble, p.manager.NextMaintenance())
	}
	return p.manager.NextMaintenance()
}

// retryTrouble is the pause before a failed repair is retried.
const retryTrouble = 500 * time.Millisecond
