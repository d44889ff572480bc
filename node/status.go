package node

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/manifests"
)

// maxProblems bounds the problems that a status lists.
const maxProblems = 100

// drain puts a set of drained endpoints in force.
func (p *Proxy) drain(ctx context.Context, set policy.Drained) error {
	return p.onRun(ctx, func() {
		p.policy.Drained = set
		if p.table != nil { // else the first configuration takes them
			p.enforce(p.store.Snapshot())
		}
	})
}

// status returns the state of the proxy.
func (p *Proxy) status(ctx context.Context) (*api.Status, error) {
	o := &p.config
	snap := p.manager.Snapshot()
	streams, ports := p.stream.Stats(), p.manager.Stats()
	s := &api.Status{
		Source: "manifests " + o.Source.Manifests, Failures: p.failures.Load(),
		Ports: servicePorts(snap), Endpoints: endpoints(snap), ProblemsAll: len(snap.Problems),
		Connections: streams.Open, Sessions: p.datagram.Stats().Sessions.Load(), Limit: int64(p.maxConnections),
		Steering:  api.Steering{Mode: p.steer.Traits().Name, Choice: p.steerChoice, Repairs: p.repairs.Load(), Conflicts: ports.Conflicts, Unclaimed: ports.Unclaimed},
		AccessLog: api.Records{To: o.AccessLog.Path},
	}
	used := p.dataPath.Load()
	s.DataPath, s.DataPathWhy = used.path.String(), used.why
	if used.path == conntrack.Kernel {
		s.Flows, s.FlowsLimit = p.flows.server.Stats().Open, int64(o.MaxFlows)
		s.Judged, s.NodeRelayed = p.flows.server.Judged(), p.flows.server.NodeRelayed()
	}
	if p.cluster != nil {
		connected := p.cluster.Stats().Connected
		s.Source, s.Connected = "API server", &connected
	}
	if at := p.applied.Load(); at != 0 {
		s.Ready, s.Applied = true, time.Unix(0, at).UTC()
	}
	if text := p.wrong.Load(); text != nil {
		s.Ready, s.Trouble = false, *text
	}
	if p.manifests != nil {
		if found := p.manifests.Stats(); found.FilesInError > 0 {
			s.Ready, s.Trouble = false, filesInError(&found)+strings.TrimSuffix("; "+s.Trouble, "; ")
		}
	}
	if text := portsNotServed(ports.Conflicts, ports.Unclaimed); text != "" {
		s.Ready, s.Trouble = false, text+strings.TrimSuffix("; "+s.Trouble, "; ")
	}
	for _, problem := range snap.Problems[:min(len(snap.Problems), maxProblems)] {
		s.Problems = append(s.Problems, api.Problem{Object: problem.Object, Text: problem.Text})
	}
	records := p.conntrack.Stats()
	s.AccessLog.Queued, s.AccessLog.Dropped = records.Queued, records.Dropped
	if p.accessLog != nil {
		lines := p.accessLog.Stats()
		s.AccessLog.Written, s.AccessLog.Lost = lines.Written, lines.Lost
	}
	v, until := p.verbosity.state()
	if s.Log.V = v; !until.IsZero() {
		until = until.UTC()
		s.Log.Until = &until
	}
	return s, p.onRun(ctx, func() {
		n := p.manager.Steering()
		s.Steering.Complete = p.manager.Complete()
		s.Steering.Steered, s.Steering.Refused, s.Steering.Silent = n.Steered.Len(), n.Refused.Len(), n.Silent.Len()
		s.Steering.Own, s.Steering.Lingering = n.Own.Len(), n.Lingering.Len()
	})
}

// portsNotServed says how many addresses and ports are not served, and why; "" if all are.
func portsNotServed(conflicts, unclaimed int64) string {
	if conflicts+unclaimed == 0 {
		return ""
	}
	var why []string
	if conflicts > 0 {
		why = append(why, fmt.Sprintf("%d that other programs have bound", conflicts))
	}
	if unclaimed > 0 {
		why = append(why, fmt.Sprintf("%d for which a limit is reached or a right is missing", unclaimed))
	}
	return fmt.Sprintf("%d addresses and ports of this node are not served (%s): the log names them", conflicts+unclaimed, strings.Join(why, ", "))
}

// filesInError names manifests whose content is not in force.
func filesInError(s *manifests.Stats) string {
	text := "1 manifest is in error: "
	if s.FilesInError > 1 {
		text = fmt.Sprintf("%d manifests are in error: ", s.FilesInError)
	}
	if text += strings.Join(s.Errors, "; "); len(s.Errors) < s.FilesInError {
		text += "; and others"
	}
	return text
}

// destinations visits what the steering plan names, and says what happens there.
func (p *Proxy) destinations(ctx context.Context, visit func(d service.Destination, steering string)) error {
	var plan listener.Steering
	if err := p.onRun(ctx, func() { plan = p.manager.Steering() }); err != nil {
		return err
	}
	for d := range plan.Steered.Keys() {
		visit(d, "steered")
	}
	for what, set := range map[string]redirect.Set[service.Destination]{
		"refused": plan.Refused, "dropped": plan.Silent, "own": plan.Own, "lingering": plan.Lingering,
	} {
		for d := range set.Keys() {
			visit(d, what)
		}
	}
	return nil
}
