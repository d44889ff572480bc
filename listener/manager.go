package listener

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
)

// Loop is one event loop with the relay's share of it.
type Loop struct {
	Poll  *poll.Loop
	Relay *relay.Worker
}

// Manager puts configurations in force. Apply, Maintain and Stop are called
// from one goroutine; Stats may be called from any.
type Manager struct {
	config     Config
	log        zerolog.Logger
	report     func(service.Name, string)
	redirector redirect.Redirector
	traits     redirect.Traits
	table      *conntrack.Table
	workers    []*worker
	datagrams  *datagram.Server

	state atomic.Pointer[state]
	open  atomic.Int64 // connections, from accept to end
	limit atomic.Int64 // of them
	stats stats
	clock func() int64 // poll.Nanotime, but for tests

	// What follows is the configuring goroutine's.
	serviceCIDRs  []netip.Prefix
	hostAddresses func() []netip.Addr
	sameLink      func(client, endpoint netip.Addr) bool
	pools         map[service.PortName]*pool
	quotas        quotas
	lanes         []*lane
	outletsOf     [][]*outlet // by service.PortID
	notServed     int         // service ports among them that nobody accepts for
	claims        claims
	leaving       leaving
	silenced      []silenced // oldest first
	planner       planner
	said          once.Texts // warnings that were given already
	incomplete    bool       // the last Apply did not succeed wholly
}

// Options are what a Manager works with, beside its Config.
type Options struct {
	Config
	// UDP are the limits and times of UDP; what Config says too is taken from
	// there.
	UDP datagram.Config
	// ServiceCIDRs are ranges of cluster IPs beside those that the snapshot
	// names: every address in them is delivered to this node.
	ServiceCIDRs []netip.Prefix
	// HostAddresses gives the addresses that this node's interfaces have
	// now. They are never taken for services; Services' own addresses among
	// them are served by sockets that are bound to them (A3.15). Nil means that
	// nobody knows.
	HostAddresses func() []netip.Addr
	// SameLink tells whether two addresses reach each other without this node,
	// so that answers from one to the other would not pass here; nil means that
	// none do. It is called for connections, and must be quick.
	SameLink   func(client, endpoint netip.Addr) bool
	Loops      []Loop
	Table      *conntrack.Table // one shard for each loop
	Redirector redirect.Redirector
	Logger     zerolog.Logger
	// Report takes what the log says of a Service's port that cannot be held.
	// Nil means that nobody wants to know. It must not wait.
	Report func(svc service.Name, text string)
}

// New gives a Manager that serves nothing yet. The loops may run already.
func New(o Options) *Manager {
	m := &Manager{
		config:        o.Config,
		log:           o.Logger,
		report:        o.Report,
		redirector:    o.Redirector,
		traits:        o.Redirector.Traits(),
		table:         o.Table,
		serviceCIDRs:  o.ServiceCIDRs,
		hostAddresses: o.HostAddresses,
		sameLink:      o.SameLink,
		pools:         make(map[service.PortName]*pool),
		quotas:        newQuotas(),
		clock:         poll.Nanotime,
		claims:        newClaims(),
		planner:       newPlanner(),
	}
	if most := m.traits.MaxLanes; most > 0 {
		m.config.MaxLanes = min(m.config.MaxLanes, most)
	}
	if m.report == nil {
		m.report = func(service.Name, string) {}
	}
	m.setLimit()
	m.state.Store(&state{table: policy.Compile(nil, &service.Snapshot{}, policy.Config{})})
	m.datagrams = newDatagrams(m, &o)
	for i, l := range o.Loops {
		m.workers = append(m.workers, newWorker(m, l.Poll, l.Relay, o.Table.Shard(i)))
	}
	return m
}

// Apply puts a policy in force: new connections go by it when Apply returns.
// What cannot be served is in the error, and everything else is in force; Maintain
// tries again. A port that another program holds is no error: the log and the
// Stats tell of it.
func (m *Manager) Apply(table *policy.Table) error {
	m.tellSources()
	prev := m.state.Load()
	next := &state{table: table, host: m.host(prev.host)}
	ids := m.changed(prev, next)
	gone := m.syncPools(ids, prev, next)
	changes := m.syncOutlets(ids, next)
	failed := m.openLanes(changes)
	m.leaveToOthers(table.Snapshot().Others)
	m.planner.setRanges(m.serviceRanges(next), table.Snapshot().Others)
	going, others := withdrawn(changes)
	next.past = keepPast(prev, len(going) > 0, m.clock())
	if len(going) > 0 {
		// Nobody new is to come where the new policy leads nobody.
		if err := m.steer(going, next); err != nil {
			failed = append(failed, err)
		}
	}
	m.tightenClaims(changes)
	// Connections are decided by the new policy from here on; but see past.
	m.state.Store(next)
	m.datagrams.Apply(table)
	m.guardLanes(changes)
	m.settleClaims(changes)
	if err := m.steer(others, next); err != nil {
		failed = append(failed, err)
	}
	for _, p := range gone {
		m.release(p)
	}
	m.datagrams.Prune()
	m.closeLeft()
	err := errors.Join(failed...)
	m.incomplete = err != nil
	return err
}

// steer puts changes into the plan, and the plan in force.
func (m *Manager) steer(changes []change, next *state) error {
	for _, ch := range changes {
		m.planner.replace(ch.old, ch.new, ch.new != nil && m.holds(ch.new.dst))
	}
	if err := m.redirector.Apply(m.planner.finish(next, m.clock())); err != nil {
		return fmt.Errorf("steering: %w", err)
	}
	return nil
}

// host gives the node's addresses; prev if they are the same.
func (m *Manager) host(prev hostAddresses) hostAddresses {
	if m.hostAddresses == nil {
		return nil
	}
	now := make(hostAddresses)
	for _, a := range m.hostAddresses() {
		now[a] = struct{}{}
	}
	if prev != nil && maps.Equal(prev, now) {
		return prev
	}
	return now
}

// changed gives the service ports that have to be looked at: those whose
// decisions may have changed, or all.
func (m *Manager) changed(prev, next *state) []service.PortID {
	ids := slices.Collect(next.table.Changed(prev.table))
	if !m.incomplete && maps.Equal(prev.host, next.host) && !m.rivals(ids, prev, next) {
		return ids
	}
	ids = ids[:0]
	for id := range max(len(prev.pools), len(next.table.Snapshot().Ports)) {
		ids = append(ids, service.PortID(id))
	}
	return ids
}

// rivals tells whether one of the service ports has, or had, an address of this
// node as its own, at a number that is another one's node port. Then that one
// loses or wins a destination, though nothing of it has changed.
func (m *Manager) rivals(ids []service.PortID, prev, next *state) bool {
	for _, s := range []*state{prev, next} {
		snap := s.table.Snapshot()
		for _, id := range ids {
			if int(id) >= len(snap.Ports) || snap.Ports[id] == nil {
				continue
			}
			for dst := range snap.Ports[id].Destinations {
				if _, is := next.table.Snapshot().FindNodePort(dst.Protocol, dst.Port); is && next.host.has(dst.Addr) {
					return true
				}
			}
		}
	}
	return false
}

// syncOutlets finds what becomes of the destinations of service ports, and what
// that changes.
func (m *Manager) syncOutlets(ids []service.PortID, next *state) []change {
	ports := next.table.Snapshot().Ports
	for len(m.outletsOf) < len(ports) {
		m.outletsOf = append(m.outletsOf, nil)
	}
	was, is := make([][]*outlet, len(ids)), make([][]*outlet, len(ids))
	for i, id := range ids {
		if int(id) >= len(m.outletsOf) {
			continue
		}
		was[i] = m.outletsOf[id]
		if int(id) < len(ports) && ports[id] != nil {
			is[i] = m.outlets(next.table, ports[id], next.host)
		}
		m.outletsOf[id] = is[i]
	}
	changes := compare(was, is)
	for _, ch := range changes {
		if ch.old != nil && !serves(ch.old.dst.Protocol) {
			m.notServed--
		}
		if ch.new != nil && !serves(ch.new.dst.Protocol) {
			m.notServed++
		}
	}
	if m.notServed > 0 {
		m.once("Services", fmt.Errorf("%d cluster IP ports of SCTP refuse: this version serves TCP and UDP", m.notServed))
	}
	return changes
}

// openLanes gives lanes to the destinations that need them.
func (m *Manager) openLanes(changes []change) (failed []error) {
	for _, ch := range changes {
		o := ch.new
		if o == nil || !o.needsLane() {
			continue
		}
		var err error
		if o.dst.Protocol == service.UDP {
			if err = m.openDatagramLane(o); err != nil {
				failed = append(failed, err)
			}
			continue
		}
		if o.lane, err = m.laneFor(m.pools[o.name], service.FamilyOf(o.dst.Addr)); err != nil {
			failed = append(failed, fmt.Errorf("service %s: %w", o.name, err))
		}
	}
	return failed
}

// guardLanes has the lanes' sockets answer whom they should.
func (m *Manager) guardLanes(changes []change) {
	touched := make(map[*lane]struct{})
	for _, ch := range changes {
		if o := ch.old; o != nil && o.lane != nil {
			o.lane.setGuard(o.dst, nil)
			touched[o.lane] = struct{}{}
		}
		if o := ch.new; o != nil && o.lane != nil {
			o.lane.setGuard(o.dst, o.guard)
			touched[o.lane] = struct{}{}
		}
	}
	for l := range touched {
		m.guardLane(l)
	}
}

// serviceRanges gives the ranges of cluster IPs that this node delivers to
// itself.
func (m *Manager) serviceRanges(s *state) (ranges []netip.Prefix) {
	for _, r := range slices.Concat(m.serviceCIDRs, s.table.Snapshot().ServiceCIDRs) {
		if a, is := s.host.within(r); is {
			m.once("service range "+r.String(), fmt.Errorf("holds %s, an address of this node: only the cluster IPs in use are taken from it", a))
			continue
		}
		if err := redirect.CheckRange(r); err != nil {
			m.once("service range "+r.String(), fmt.Errorf("%w: it is left out", err))
			continue
		}
		ranges = append(ranges, r)
	}
	return ranges
}

// holds tells whether a destination is claimed and has its socket.
func (m *Manager) holds(dst service.Destination) bool {
	c := m.claims.all[dst]
	return c != nil && c.socket != nil
}

// setLimit says how many connections may be open: two descriptors each, of
// those that claims leave.
func (m *Manager) setLimit() {
	m.claims.shares.mu.Lock()
	defer m.claims.shares.mu.Unlock()
	m.setLimitLocked()
}

// setLimitLocked is setLimit for who holds the lock of the claims' shares.
func (m *Manager) setLimitLocked() {
	m.limit.Store(m.limitBeside(m.stats.claims.Load()))
}

// limitBeside gives how many connections may be open beside so many claims.
func (m *Manager) limitBeside(claims int64) int64 {
	limit := int64(m.config.MaxConnections)
	if m.config.Descriptors > 0 {
		limit = min(limit, max((int64(m.config.Descriptors)-claims)/2, 1))
	}
	return limit
}

// resumeBelow gives some room before accepting goes on, so that it does not
// stop and go with every connection.
func (m *Manager) resumeBelow() int64 {
	limit := m.limit.Load()
	return limit - limit/64
}

// warn logs a service's problem once.
func (m *Manager) warn(port *service.Port, problem error) {
	if problem == nil {
		return
	}
	m.once("Service "+port.Name.Name.String(), problem)
}

// once logs a problem of an object, unless it was logged before.
func (m *Manager) once(object string, problem error) {
	if m.said.First(object + ": " + problem.Error()) {
		m.log.Warn().Str("object", object).Msg(problem.Error())
	}
}

// Maintain does what has to be done from time to time: it follows the node's
// addresses, lets go of destinations that carry no connection any more, tries
// again what Apply could not do and ports that other programs held, and has the
// steering verified. NextMaintenance says when it is due.
func (m *Manager) Maintain() (repaired bool, err error) {
	s := m.state.Load()
	if m.incomplete || !maps.Equal(s.host, m.host(s.host)) {
		return false, m.Apply(s.table)
	}
	m.closeLeft()
	m.forgetPast()
	won := m.retryClaims()
	for _, o := range won {
		m.planner.place(o, true)
	}
	if m.dropIdle() || len(won) > 0 {
		if err := m.steer(nil, s); err != nil {
			m.incomplete = true
			return false, err
		}
	}
	return m.redirector.Verify()
}

// Stop ends accepting and all connections, and hands their records on. Steering
// should have been taken back before, so that clients are refused and not left
// to wait. The loops go on.
func (m *Manager) Stop(ctx context.Context) error {
	for _, c := range m.claims.all {
		if c.socket != nil {
			m.unclaim(c)
		}
	}
	clear(m.claims.all)
	clear(m.claims.missing)
	for _, l := range m.leaving.all() {
		m.letGo(l)
	}
	if err := m.datagrams.Stop(ctx); err != nil {
		return err
	}
	var pending sync.WaitGroup
	for _, w := range m.workers {
		pending.Add(1)
		if !w.post(func() { defer pending.Done(); w.stop() }) {
			pending.Done()
		}
	}
	done := make(chan struct{})
	go func() { pending.Wait(); close(done) }()
	select {
	case <-done:
	case <-ctx.Done():
		return fmt.Errorf("ending %d connections: %w", m.open.Load(), ctx.Err())
	}
	for _, l := range m.lanes {
		m.closeLane(l)
	}
	m.lanes = nil
	return nil
}

// Snapshot gives what the configuration in force was made of.
func (m *Manager) Snapshot() *service.Snapshot { return m.state.Load().table.Snapshot() }

// Complete tells whether the last configuration is wholly in force.
func (m *Manager) Complete() bool { return !m.incomplete }

// verifyInterval is how often Maintain should be called otherwise. A look that
// finds nothing changed costs a fraction of a millisecond.
const verifyInterval = 5 * time.Second

// retryInterval is how often Maintain should be called while there is something
// to try again or to wait for.
const retryInterval = time.Second

// NextMaintenance gives the time until Maintain should be called.
func (m *Manager) NextMaintenance() time.Duration {
	if m.incomplete || m.lingers() || len(m.claims.missing) > 0 || m.leaving.any() || len(m.state.Load().past) > 0 {
		return retryInterval
	}
	return verifyInterval
}
