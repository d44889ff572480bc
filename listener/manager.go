package listener

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
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
	config      Config
	log         zerolog.Logger
	redirector  redirect.Redirector
	table       *conntrack.Table
	workers     []*worker
	resumeBelow int64

	state atomic.Pointer[state]
	open  atomic.Int64 // connections, from accept to end
	stats stats

	// What follows is the configuring goroutine's.
	serviceCIDRs []netip.Prefix
	hostAddrs    func() []netip.Addr
	pools        map[service.PortName]*pool
	lanes        []*lane
	clusterIPs   map[netip.Addr]struct{} // of the last plan
	lingering    map[netip.Addr]struct{} // addresses that left but carry connections
	said         map[string]struct{}     // warnings that were given already
	incomplete   bool                    // the last Apply did not succeed wholly
}

// stats counts what concerns no single connection.
type stats struct {
	strays     atomic.Uint64
	atLimit    atomic.Uint64
	exhausted  atomic.Uint64
	ownTrouble atomic.Uint64
	listeners  atomic.Int64
}

// Stats is what a Manager has counted.
type Stats struct {
	Open       int64             // connections now
	Dialing    int64             // those of them that wait for an endpoint to answer
	Listeners  int64             // listening sockets
	Pins       balancer.PinStats // of all service ports
	Strays     uint64            // accepted connections that were sent to no service
	AtLimit    uint64            // pauses of accepting at the limit of all connections
	Exhausted  uint64            // pauses of accepting because the kernel had no descriptor or memory
	OwnTrouble uint64            // attempts that failed for want of a local port, a descriptor or a right
}

// Options are what a Manager works with, beside its Config.
type Options struct {
	Config
	// ServiceCIDRs are ranges of cluster IPs beside those that the snapshot
	// names: every address in them is delivered to this node.
	ServiceCIDRs []netip.Prefix
	// HostAddresses gives the addresses that this node's interfaces have
	// now. They are never taken for services; nil means none.
	HostAddresses func() []netip.Addr
	Loops         []Loop
	Table         *conntrack.Table // one shard for each loop
	Redirector    redirect.Redirector
	Logger        zerolog.Logger
}

// New gives a Manager that serves nothing yet. The loops may run already.
func New(o Options) *Manager {
	m := &Manager{
		config:       o.Config,
		log:          o.Logger,
		redirector:   o.Redirector,
		table:        o.Table,
		serviceCIDRs: o.ServiceCIDRs,
		hostAddrs:    o.HostAddresses,
		// Some room before accepting goes on, so that it does not stop and go
		// with every connection.
		resumeBelow: int64(o.MaxConnections - o.MaxConnections/64),
		pools:       make(map[service.PortName]*pool),
		lingering:   make(map[netip.Addr]struct{}),
		said:        make(map[string]struct{}),
	}
	m.state.Store(&state{table: policy.Compile(nil, &service.Snapshot{}, policy.Config{})})
	for i, l := range o.Loops {
		m.workers = append(m.workers, newWorker(m, l.Poll, l.Relay, o.Table.Shard(i)))
	}
	return m
}

// Apply puts a policy in force: new connections go by it when Apply returns.
// What cannot be served is in the error, and everything else is in force; Maintain
// tries again.
func (m *Manager) Apply(table *policy.Table) error {
	snap := table.Snapshot()
	next := &state{table: table, pools: make([]*pool, len(snap.Ports))}
	gone := m.syncPools(snap, next)
	plan, err := m.plan(table, next)

	m.state.Store(next)
	// Connections are decided by the new policy from here on, also those that
	// the old steering still lets in.
	if steerErr := m.redirector.Apply(plan); steerErr != nil {
		err = errors.Join(err, fmt.Errorf("steering: %w", steerErr))
	}
	for _, p := range gone {
		m.release(p)
	}
	m.incomplete = err != nil
	return err
}

// syncPools gives each service port its pool, and gives back those that have no
// port any more.
func (m *Manager) syncPools(snap *service.Snapshot, next *state) (gone []*pool) {
	seen := 0
	for id, port := range snap.Ports {
		if port == nil || port.Name.Protocol != service.TCP {
			continue
		}
		seen++
		p := m.pools[port.Name]
		switch {
		case p == nil:
			var problem error
			p, problem = newPool(port, &m.config, m.table.Counters(port.Name))
			m.warn(port, problem)
			m.pools[port.Name] = p
		case p.port != port:
			m.warn(port, p.configure(port, &m.config))
		}
		next.pools[id] = p
	}
	if seen == len(m.pools) {
		return nil
	}
	for name, p := range m.pools {
		if id := p.port.ID; int(id) >= len(next.pools) || next.pools[id] != p {
			delete(m.pools, name)
			gone = append(gone, p)
		}
	}
	return gone
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
	key := object + ": " + problem.Error()
	if _, was := m.said[key]; was {
		return
	}
	m.said[key] = struct{}{}
	m.log.Warn().Str("object", object).Msg(problem.Error())
}

// plan says what has to be steered for a state, and opens the lanes for it.
func (m *Manager) plan(table *policy.Table, st *state) (redirect.Plan, error) {
	plan := redirect.Plan{
		Steer:      make(map[service.Destination]redirect.Target),
		Refuse:     make(map[service.Destination]struct{}),
		Silent:     make(map[service.Destination]struct{}),
		ClusterIPs: make(map[netip.Addr]struct{}),
	}
	var failed []error
	notServed := 0
	var host []netip.Addr
	if m.hostAddrs != nil {
		host = m.hostAddrs()
	}
	for id, port := range table.Snapshot().Ports {
		if port == nil {
			continue
		}
		for f := range port.Families {
			view := &port.Families[f]
			if !view.ClusterIP.IsValid() {
				continue
			}
			if slices.Contains(host, view.ClusterIP) {
				m.warn(port, fmt.Errorf("its cluster IP %s is an address of this node: not served", view.ClusterIP))
				continue
			}
			plan.ClusterIPs[view.ClusterIP] = struct{}{}
			p := st.pools[id]
			if p == nil {
				notServed++
				continue
			}
			dst := service.Destination{Addr: view.ClusterIP, Port: port.Port, Protocol: port.Name.Protocol}
			switch table.Steering(dst) {
			case policy.Accept:
				laneSocket, err := m.laneFor(p, service.Family(f))
				if err != nil {
					failed = append(failed, fmt.Errorf("service %s: %w", port.Name, err))
					continue
				}
				plan.Steer[dst] = redirect.Target{Port: laneSocket}
			case policy.Refuse:
				plan.Refuse[dst] = struct{}{}
			case policy.Drop:
				plan.Silent[dst] = struct{}{}
			}
		}
	}
	if notServed > 0 {
		m.once("Services", fmt.Errorf("%d cluster IP ports of UDP and SCTP refuse: this version serves TCP", notServed))
	}
	plan.Local = m.local(table.Snapshot(), plan.ClusterIPs, host)
	return plan, errors.Join(failed...)
}

// local says what this node delivers to itself: the ranges of cluster IPs, the
// cluster IPs outside of them, and those that no service has any more but that
// established connections still use (A8.7).
func (m *Manager) local(snap *service.Snapshot, clusterIPs map[netip.Addr]struct{}, host []netip.Addr) []netip.Prefix {
	var ranges []netip.Prefix
	for _, r := range slices.Concat(m.serviceCIDRs, snap.ServiceCIDRs) {
		if i := slices.IndexFunc(host, r.Contains); i >= 0 {
			m.once("service range "+r.String(), fmt.Errorf("holds %s, an address of this node: only the cluster IPs in use are taken from it", host[i]))
			continue
		}
		ranges = append(ranges, r)
	}
	cidrs := len(ranges)
	covered := func(a netip.Addr) bool {
		for _, r := range ranges[:cidrs] {
			if r.Contains(a) {
				return true
			}
		}
		return false
	}
	for a := range m.lingering {
		if _, back := clusterIPs[a]; back || covered(a) {
			delete(m.lingering, a)
		}
	}
	for a := range m.clusterIPs {
		if _, still := clusterIPs[a]; !still && !covered(a) {
			m.lingering[a] = struct{}{}
		}
	}
	m.clusterIPs = clusterIPs
	for _, addrs := range []map[netip.Addr]struct{}{clusterIPs, m.lingering} {
		for a := range addrs {
			if !covered(a) {
				ranges = append(ranges, netip.PrefixFrom(a, a.BitLen()))
			}
		}
	}
	return ranges
}

// laneFor gives the listener port of a pool's lane, opening what is missing.
func (m *Manager) laneFor(p *pool, f service.Family) (uint16, error) {
	if p.lane == nil {
		p.lane = m.assignLane()
		p.lane.ports++
	}
	s := &p.lane.sockets[f]
	if s.port != 0 {
		return s.port, nil
	}
	if err := p.lane.open(f, &m.config); err != nil {
		return 0, err
	}
	m.stats.listeners.Add(1)
	fd := s.fd
	for _, w := range m.workers {
		w.post(func() { w.join(fd) })
	}
	return s.port, nil
}

// assignLane gives a lane of its own as long as the bound allows, else the one
// with the fewest service ports.
func (m *Manager) assignLane() *lane {
	if len(m.lanes) < m.config.MaxLanes {
		l := new(lane)
		m.lanes = append(m.lanes, l)
		return l
	}
	m.once("listening sockets", fmt.Errorf("more than %d service ports: some share a listening socket, and with it its queue", m.config.MaxLanes))
	least := m.lanes[0]
	for _, l := range m.lanes[1:] {
		if l.ports < least.ports {
			least = l
		}
	}
	return least
}

// release lets go of a pool whose service port is gone. Its connections go on.
func (m *Manager) release(p *pool) {
	m.table.Forget(p.port.Name)
	l := p.lane
	if l == nil {
		return
	}
	p.lane = nil
	if l.ports--; l.ports > 0 {
		return
	}
	for i := range m.lanes {
		if m.lanes[i] == l {
			m.lanes[i] = m.lanes[len(m.lanes)-1]
			m.lanes = m.lanes[:len(m.lanes)-1]
			break
		}
	}
	m.closeLane(l)
}

func (m *Manager) closeLane(l *lane) {
	m.stats.listeners.Add(-int64(l.close(m.workers)))
}

// Maintain does what has to be done from time to time: it lets go of addresses
// that carry no connection any more, tries again what Apply could not do, and has
// the steering verified. NextMaintenance says when it is due.
func (m *Manager) Maintain() (repaired bool, err error) {
	if m.incomplete || m.dropIdle() {
		return false, m.Apply(m.state.Load().table)
	}
	return m.redirector.Verify()
}

// dropIdle forgets the lingering addresses that no connection uses. It tells
// whether there were any.
func (m *Manager) dropIdle() bool {
	if len(m.lingering) == 0 {
		return false
	}
	used := make(map[netip.Addr]struct{})
	for _, w := range m.workers {
		var seen map[netip.Addr]struct{}
		done := make(chan struct{})
		if !w.post(func() {
			defer close(done)
			seen = make(map[netip.Addr]struct{})
			w.shard.Each(func(r *conntrack.Record) {
				if _, is := m.lingering[r.VIP.Addr()]; is {
					seen[r.VIP.Addr()] = struct{}{}
				}
			})
		}) {
			return false
		}
		<-done
		for a := range seen {
			used[a] = struct{}{}
		}
	}
	before := len(m.lingering)
	for a := range m.lingering {
		if _, is := used[a]; !is {
			delete(m.lingering, a)
		}
	}
	return len(m.lingering) < before
}

// Stop ends accepting and all connections, and hands their records on. Steering
// should have been taken back before, so that clients are refused and not left
// to wait. The loops go on.
func (m *Manager) Stop(ctx context.Context) error {
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

// Stats gives what was counted.
func (m *Manager) Stats() Stats {
	s := Stats{
		Open:       m.open.Load(),
		Listeners:  m.stats.listeners.Load(),
		Strays:     m.stats.strays.Load(),
		AtLimit:    m.stats.atLimit.Load(),
		Exhausted:  m.stats.exhausted.Load(),
		OwnTrouble: m.stats.ownTrouble.Load(),
	}
	for _, p := range m.state.Load().pools {
		if p == nil {
			continue
		}
		s.Dialing += p.dialing.Load()
		pins := p.balancer.Pins()
		s.Pins.Pins += pins.Pins
		s.Pins.Evicted += pins.Evicted
		s.Pins.Expired += pins.Expired
	}
	return s
}

// Snapshot gives what the configuration in force was made of.
func (m *Manager) Snapshot() *service.Snapshot { return m.state.Load().table.Snapshot() }

// Complete tells whether the last configuration is wholly in force.
func (m *Manager) Complete() bool { return !m.incomplete }

// verifyInterval is how often Maintain should be called otherwise. A look that
// finds nothing changed costs a fraction of a millisecond.
const verifyInterval = 5 * time.Second

// retryInterval is how often Maintain should be called while Apply is
// incomplete.
const retryInterval = time.Second

// NextMaintenance gives the time until Maintain should be called.
func (m *Manager) NextMaintenance() time.Duration {
	if m.incomplete || len(m.lingering) > 0 {
		return retryInterval
	}
	return verifyInterval
}
