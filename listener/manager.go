package listener

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Options are what a Manager works with.
type Options struct {
	// Protocols are those that are served. Cluster IP ports of others, and of those that
	// the kernel lacks, refuse.
	Protocols map[service.Protocol]Protocol
	DataPaths []DataPath // of all of them
	Flows     []Flows    // nil if all connections pass the DataPaths
	// MaxBound bounds the sockets of bound ports and those of TakeSockets. Those that
	// are bound stay; the rest wait until there is room.
	MaxBound int
	// Descriptors controls the descriptors that these sockets leave; nil if there are enough.
	Descriptors Descriptors
	// ServiceCIDRs are ranges of cluster IPs beside those that the snapshot
	// names: every address in them is delivered to this node.
	ServiceCIDRs []netip.Prefix
	// HostAddresses returns the current addresses of this node's interfaces. They
	// are never taken for Services; Services' own addresses among them are served by
	// bound ports (A3.15). Nil means that they are not known.
	HostAddresses func() []netip.Addr
	Loops         []*poll.Loop
	Table         *conntrack.Table // one shard for each loop
	Redirector    redirect.Redirector
	// Clock replaces poll.Nanotime for grace periods in tests.
	Clock  func() int64
	Logger zerolog.Logger
	// Report receives the log's text about a Service's port that cannot be bound. It must not block.
	Report func(svc service.Name, text string)
}

// Manager puts configurations in force. Its methods belong to one goroutine, except
// Stats, Snapshot, Policy, TakeSockets and ReturnSockets.
type Manager struct {
	options   Options
	protocols [service.SCTP + 1]*Protocol // nil where one is not served
	traits    redirect.Traits
	recorders []*recorder
	once      once.Log

	table      atomic.Pointer[policy.Table] // in force
	host       hostnet.Addresses
	ports      [][]*destination      // by service.PortID
	lacking    [service.SCTP + 1]int // destinations among them whose protocol the kernel lacks
	lackingAll atomic.Int64          // their sum
	bound      boundPorts
	planner    planner
	incomplete bool // the last Apply did not succeed wholly
}

// New returns a Manager that serves nothing yet. The loops may run already.
func New(o Options) *Manager {
	if o.Clock == nil {
		o.Clock = poll.Nanotime
	}
	m := &Manager{options: o, traits: o.Redirector.Traits(), once: once.Log{Logger: o.Logger}, planner: newPlanner()}
	m.bound.init(&o)
	for p, served := range o.Protocols {
		m.protocols[p] = &served
	}
	m.planner.keeps = func(p service.Protocol) bool { return m.protocols[p] != nil && m.protocols[p].KeepsConnections }
	m.table.Store(policy.Compile(nil, &service.Snapshot{}, policy.Config{}))
	for i, l := range o.Loops {
		m.recorders = append(m.recorders, startRecorder(l, o.Table.Shard(i)))
	}
	return m
}

// Apply puts a policy in force: new connections are decided by it when Apply
// returns. What cannot be served is in the error, and everything else is in force;
// Maintain tries again. A port that another program holds is no error: the log and
// the Stats say so.
func (m *Manager) Apply(table *policy.Table) error {
	prev, host := m.table.Load(), m.currentHost()
	ids := m.changed(prev, table, host)
	changes := m.sync(ids, table, host)
	failed := m.listen(changes)
	m.lingerForOthers(table.Snapshot().Others)
	m.planner.setRanges(m.serviceRanges(table, host), table.Snapshot().Others)
	going, others := withdrawn(changes)
	if len(going) > 0 {
		// No new connection must arrive where the new policy has no endpoint for it.
		if err := m.steer(going, table, host); err != nil {
			failed = append(failed, err)
		}
	}
	m.restrictBound(changes)
	m.table.Store(table)
	m.host = host
	for _, d := range m.options.DataPaths {
		d.Apply(table, host, len(going) > 0)
	}
	for _, f := range m.options.Flows {
		f.Apply(table, host)
	}
	m.settleBound(changes)
	if err := m.steer(others, table, host); err != nil {
		failed = append(failed, err)
	}
	m.prune()
	err := errors.Join(failed...)
	m.incomplete = err != nil
	return err
}

// steer puts changes into the plan, and the plan in force.
func (m *Manager) steer(changes []change, table *policy.Table, host hostnet.Addresses) error {
	for _, ch := range changes {
		m.planner.replace(ch.old, ch.new, ch.new != nil && m.bound.has(ch.new.Destination))
	}
	if err := m.options.Redirector.Apply(m.planner.finish(table, host, m.options.Clock())); err != nil {
		return fmt.Errorf("steering: %w", err)
	}
	return nil
}

// currentHost returns the node's addresses; the same set as before if they are the
// same.
func (m *Manager) currentHost() hostnet.Addresses {
	if m.options.HostAddresses == nil {
		return nil
	}
	now := hostnet.NewAddresses(m.options.HostAddresses())
	if m.host != nil && maps.Equal(m.host, now) {
		return m.host
	}
	return now
}

// changed returns the service ports whose destinations may have changed.
func (m *Manager) changed(prev, next *policy.Table, host hostnet.Addresses) []service.PortID {
	ids := slices.Collect(next.Changed(prev))
	if !m.incomplete && maps.Equal(m.host, host) && !m.nodePortsAffected(ids, prev, next, host) {
		return ids
	}
	ids = ids[:0]
	for id := range max(len(m.ports), len(next.Snapshot().Ports)) {
		ids = append(ids, service.PortID(id))
	}
	return ids
}

// nodePortsAffected reports whether one of the service ports has, or had, its own address among
// this node's, with another service port's node port as its port. Then that other one loses or
// gains a destination, though it has not changed itself.
func (m *Manager) nodePortsAffected(ids []service.PortID, prev, next *policy.Table, host hostnet.Addresses) bool {
	for _, snap := range []*service.Snapshot{prev.Snapshot(), next.Snapshot()} {
		for _, id := range ids {
			if int(id) >= len(snap.Ports) || snap.Ports[id] == nil {
				continue
			}
			for dst := range snap.Ports[id].Destinations {
				if _, is := next.Snapshot().FindNodePort(dst.Protocol, dst.Port); is && host.Has(dst.Addr) {
					return true
				}
			}
		}
	}
	return false
}

// sync finds the destinations of service ports, and what has changed about them.
func (m *Manager) sync(ids []service.PortID, table *policy.Table, host hostnet.Addresses) []change {
	ports := table.Snapshot().Ports
	for len(m.ports) < len(ports) {
		m.ports = append(m.ports, nil)
	}
	was, is := make([][]*destination, len(ids)), make([][]*destination, len(ids))
	for i, id := range ids {
		if int(id) >= len(m.ports) {
			continue
		}
		was[i] = m.ports[id]
		if int(id) < len(ports) && ports[id] != nil {
			is[i] = m.destinations(table, ports[id], host)
		}
		m.ports[id] = is[i]
	}
	changes := compare(was, is)
	for _, ch := range changes {
		if ch.old != nil && ch.old.Action == policy.None {
			m.lacking[ch.old.Protocol]--
		}
		if ch.new != nil && ch.new.Action == policy.None {
			m.lacking[ch.new.Protocol]++
		}
	}
	all := 0
	for p, n := range m.lacking {
		all += n
		if protocol := service.Protocol(p); n > 0 {
			m.once.Warn("Services", fmt.Errorf("%s ports refuse: %w", protocol, m.lacks(protocol)))
		}
	}
	m.lackingAll.Store(int64(all))
	return changes
}

// regained reports whether the kernel has a protocol now that it lacked when the
// configuration in force was applied.
func (m *Manager) regained() bool {
	for p, n := range m.lacking {
		if protocol := service.Protocol(p); n > 0 && m.lacks(protocol) == nil {
			m.options.Logger.Info().Str("object", "Services").Msgf("%s ports are served now: the kernel has %s", protocol, protocol)
			m.incomplete = true // so that Apply looks at all ports
			return true
		}
	}
	return false
}

// listen opens listening sockets for the destinations that need them.
func (m *Manager) listen(changes []change) (failed []error) {
	for _, ch := range changes {
		if ch.old != nil && ch.old.target.Port != 0 {
			m.protocols[ch.old.Protocol].Listeners.Unlisten(ch.old.Opening)
		}
	}
	for _, ch := range changes {
		if ch.new == nil || !ch.new.needsListener() {
			continue
		}
		var err error
		if ch.new.target, err = m.protocols[ch.new.Protocol].Listeners.Listen(ch.new.Opening); err != nil {
			failed = append(failed, err)
		}
	}
	return failed
}

// prune makes the data paths close what is no longer used.
func (m *Manager) prune() {
	for _, d := range m.options.DataPaths {
		d.Prune()
	}
}

// serviceRanges returns the ranges of cluster IPs that this node delivers to itself.
func (m *Manager) serviceRanges(table *policy.Table, host hostnet.Addresses) (ranges []netip.Prefix) {
	for _, r := range slices.Concat(m.options.ServiceCIDRs, table.Snapshot().ServiceCIDRs) {
		if a, is := host.Within(r); is {
			m.once.Warn("service range "+r.String(), fmt.Errorf("holds %s, an address of this node: only the cluster IPs in use are taken from it", a))
			continue
		}
		if err := redirect.CheckRange(r); err != nil {
			m.once.Warn("service range "+r.String(), fmt.Errorf("%w: it is left out", err))
			continue
		}
		ranges = append(ranges, r)
	}
	return ranges
}

// warn logs a problem of a service port once.
func (m *Manager) warn(port *service.Port, problem error) {
	m.once.Warn("Service "+port.Name.Name.String(), problem)
}

// Maintain does the periodic work: it follows the node's addresses, drops lingering destinations
// without connections, retries what Apply could not do and ports that other programs held, serves
// a protocol that the kernel has gained, and verifies the steering. NextMaintenance says when it
// is due.
func (m *Manager) Maintain() (repaired bool, err error) {
	table := m.table.Load()
	if m.incomplete || m.regained() || !maps.Equal(m.host, m.currentHost()) {
		return false, m.Apply(table)
	}
	m.prune()
	won := m.retryBound()
	for _, d := range won {
		m.planner.place(d, true)
	}
	if m.dropLingering() || len(won) > 0 {
		if err := m.steer(nil, table, m.host); err != nil {
			m.incomplete = true
			return false, err
		}
	}
	return m.options.Redirector.Verify()
}

// Stop ends accepting and all connections, and hands their records on. Steering
// should have been undone before, so that clients are refused and do not wait. The
// loops go on.
func (m *Manager) Stop(ctx context.Context) error {
	for _, d := range m.options.DataPaths {
		if err := d.Stop(ctx); err != nil {
			return err
		}
	}
	for _, p := range m.bound.all {
		p.open = false
		m.account(p)
	}
	clear(m.bound.all)
	clear(m.bound.missing)
	for _, r := range m.recorders {
		r.stop()
	}
	m.recorders = nil
	return nil
}

// Snapshot returns the one that the configuration in force was made of.
func (m *Manager) Snapshot() *service.Snapshot { return m.table.Load().Snapshot() }

// Policy returns the policy in force.
func (m *Manager) Policy() *policy.Table { return m.table.Load() }

// Complete reports whether the last configuration is wholly in force.
func (m *Manager) Complete() bool { return !m.incomplete }

// Stats is what a Manager has counted.
type Stats struct {
	Claims         int64  `metric:"sluice_port_claims" help:"Sockets bound to node ports, health check node ports and Service addresses of this node."`
	Conflicts      int64  `metric:"sluice_port_conflicts" help:"Addresses and ports among them that another program has bound: they are not served."`
	ConflictsTotal uint64 `metric:"sluice_port_conflicts_total" help:"Times that another program was found to have bound one."`
	Unclaimed      int64  `metric:"sluice_ports_unclaimed" help:"Addresses and ports among them that wait for a limit or a right."`
	Lacking        int64  `metric:"sluice_sctp_ports_missing" help:"SCTP ports of cluster IPs that are not relayed because this kernel has no SCTP."`
}

// Stats returns what was counted. It may be called from any goroutine.
func (m *Manager) Stats() Stats {
	b := &m.bound
	return Stats{
		Claims:         b.quotas.total(),
		Conflicts:      b.conflicts.Load(),
		ConflictsTotal: b.conflictsTotal.Load(),
		Unclaimed:      b.unbound.Load(),
		Lacking:        m.lackingAll.Load(),
	}
}

// verifyInterval is how often Maintain should be called otherwise. A verification
// that finds nothing changed costs a fraction of a millisecond.
const verifyInterval = 5 * time.Second

// retryInterval is how often Maintain should be called while there is something to
// try again or to wait for.
const retryInterval = time.Second

// NextMaintenance returns the time until Maintain should be called.
func (m *Manager) NextMaintenance() time.Duration {
	if m.incomplete || m.lacking != ([service.SCTP + 1]int{}) || m.planner.lingers() || len(m.bound.missing) > 0 ||
		slices.ContainsFunc(m.options.DataPaths, DataPath.InGrace) {
		return retryInterval
	}
	return verifyInterval
}
