package e2e

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// The attack's settings, which `make fuzz-relay` sets.
const (
	fuzzForEnv  = "SLUICE_FUZZ_RELAY_FOR"  // time in each mode
	fuzzSeedEnv = "SLUICE_FUZZ_RELAY_SEED" // repeats the scripts and faults of a run
)

const (
	fuzzRound    = 7 * time.Second  // on one proxy, at most
	fuzzPatience = 30 * time.Second // with one talk
	fuzzWorkers  = 16               // talks at once
	fuzzSessions = 4                // UDP sessions at once
	fuzzHeld     = 4                // talks that stay open until the proxy stops
)

// In CI an attack is short, and who has talked rests before the next talk.
const (
	fuzzQuick = 6 * time.Second // in each mode
	fuzzRest  = 300 * time.Millisecond
)

// Indexes of clients: outside, behind a bad link, and the node itself.
const (
	nearClient = iota
	farClient
	nodeClient
	fuzzClients
)

// farServer is the index of the endpoint behind a bad link.
const farServer = 2

// externalIPs are addresses without a route on the node.
var externalIPs = []string{"203.0.113.10", "2001:db8:113::10"}

// TestFuzzRelay attacks the data path at random in every mode, with splice and
// without. It plays connections of which both sides know every byte, with
// half-closes, resets, urgent bytes, pauses, small buffers and segments; and UDP
// sessions. Packets are lost, repeated and reordered, and faults are injected.
// Every connection must leave one record that agrees with both sides. The seed
// repeats scripts and faults, but not the timing.
func TestFuzzRelay(t *testing.T) {
	t.Parallel()
	lasts, rest, seed := fuzzQuick, fuzzRest, uint64(time.Now().UnixNano())
	if text := os.Getenv(fuzzForEnv); text != "" {
		var err error
		rest = 0
		if lasts, err = time.ParseDuration(text); err != nil {
			t.Fatalf("%s: %v", fuzzForEnv, err)
		}
	}
	if text := os.Getenv(fuzzSeedEnv); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s: %v", fuzzSeedEnv, err)
		}
	}
	var total fuzzCounts
	t.Cleanup(func() {
		t.Logf("seed %d: %s", seed, total.String())
	})
	for i, m := range modes {
		t.Run(m.name, func(t *testing.T) {
			t.Parallel()
			ends := time.Now().Add(lasts)
			splices := []string{"--splice=auto", "--splice=off"}
			for round := 0; round < len(splices) || time.Now().Before(ends); round++ {
				splice := splices[round%len(splices)]
				ok := t.Run(fmt.Sprintf("%d %s", round, splice[2:]), func(t *testing.T) {
					newFuzz(t, m, seed+uint64(i)<<32+uint64(round)<<40, splice, &total).run(min(fuzzRound, lasts/2), rest)
				})
				if !ok {
					return
				}
			}
		})
	}
}

// fuzzCounts are the attack's results.
type fuzzCounts struct {
	connections, failed, resets, unnoticed, bytes, sessions, datagrams, answers, records, faults, differences atomic.Int64
}

func (c *fuzzCounts) String() string {
	return fmt.Sprintf("%d connections (%d more could not be made during faults; %d were to end by a reset, which %d did not notice), %d bytes, %d UDP sessions, %d datagrams, %d answers, %d faults, %d records, %d differences",
		c.connections.Load(), c.failed.Load(), c.resets.Load(), c.unnoticed.Load(), c.bytes.Load(), c.sessions.Load(), c.datagrams.Load(), c.answers.Load(), c.faults.Load(), c.records.Load(), c.differences.Load())
}

// fuzzResult is a finished talk.
type fuzzResult struct {
	talk         *fuzzTalk
	client       netip.AddrPort
	connected    bool
	greeted      bool
	began, ended time.Time // of connecting
	over         time.Time
	mine         fuzzOutcome
	server       int
}

// fuzz is one round on one proxy.
type fuzz struct {
	t       *testing.T
	m       mode
	seed    uint64
	total   *fuzzCounts
	lab     *netns.Lab
	p       *proxy
	clients [fuzzClients]*netns.Host
	hosts   []*netns.Host // of the endpoints
	web     []*object     // TCP services, the second one with small buffers
	dns     *object
	targets []netip.AddrPort // of TCP
	lookups []netip.AddrPort // of UDP
	servers [][]*fuzzServer  // for each host, one for each of web
	packets *fuzzDatagramServer
	sockets []net.PacketConn // of the endpoints
	faults  *fuzzFaults
	// unnoticed counts the resets for which a side waited in vain.
	unnoticed int
	next      atomic.Uint32
	ports     [fuzzClients]atomic.Uint32

	mu       sync.Mutex
	results  []fuzzResult           // guarded by mu
	sessions []*fuzzSession         // guarded by mu
	outcomes map[uint32]fuzzOutcome // of the servers; guarded by mu
	met      map[uint32]int         // greetings; guarded by mu
	served   int                    // talks at endpoints, except those that stay open until the stop; guarded by mu
	wrong    int                    // guarded by mu
}

// newFuzz builds the network and starts the proxy.
func newFuzz(t *testing.T, m mode, seed uint64, splice string, total *fuzzCounts) *fuzz {
	t.Helper()
	f := &fuzz{t: t, m: m, seed: seed, total: total, lab: netns.NewLab(t, 2), outcomes: map[uint32]fuzzOutcome{}, met: map[uint32]int{}}
	line := netns.Line{Loss: 20, Duplicate: 10, Reorder: 30, Delay: 10 * time.Millisecond, MTU: 1400, Seed: seed}
	far := f.lab.AddFarHost(t, "far", 1, line)
	f.clients = [fuzzClients]*netns.Host{f.lab.Client, far, f.lab.Node}
	f.hosts = append(f.lab.Backends, f.lab.AddFarHost(t, "b3", 2, line))
	f.web = []*object{
		{name: "web", vips: []string{vip4, vip6}, port: 80, nodePort: 30080, target: 8080, externalIPs: externalIPs},
		{name: "small", vips: []string{"10.96.0.11", "fd00:96::11"}, port: 80, nodePort: 30081, target: 8081},
	}
	f.dns = &object{name: "dns", vips: []string{"10.96.0.12", "fd00:96::12"}, port: 53, nodePort: 30053, target: 9000, protocol: corev1.ProtocolUDP, portName: "dns"}
	f.packets = &fuzzDatagramServer{seed: seed, most: 20000, got: map[uint32]map[uint16]int{}, twice: map[uint32]int{}}
	if m.lacks(fragments) {
		f.packets.most = 1300
	}
	f.serveAll()
	f.p = newProxy(t, f.lab.Node)
	f.p.mode = m
	f.faults = newFuzzFaults(f)
	f.list(f.hosts)
	f.targets, f.lookups = append(f.destinations(f.web[0]), f.destinations(f.web[1])...), f.destinations(f.dns)
	f.p.start(splice, promptDials)
	for client := range f.clients {
		f.faults.untilServed(client)
	}
	return f
}

// serveAll starts the endpoints' servers.
func (f *fuzz) serveAll() {
	f.servers, f.sockets = make([][]*fuzzServer, len(f.hosts)), make([]net.PacketConn, len(f.hosts))
	for i := range f.hosts {
		for range f.web {
			f.servers[i] = append(f.servers[i], &fuzzServer{script: f.script, index: i, conns: map[*net.TCPConn]*atomic.Bool{}, told: f.tell, met: f.meet, deadline: f.deadline})
		}
		must.OK(f.t, f.listen(i))
		f.t.Cleanup(func() { f.silence(i) })
	}
}

// listen opens an endpoint's ports.
func (f *fuzz) listen(i int) error {
	for j, s := range f.servers[i] {
		small := j * 4096
		lc := net.ListenConfig{Control: control(j*536, small, small)}
		lc.SetMultipathTCP(false)
		l, err := f.hosts[i].ListenConfig(&lc, "tcp", fmt.Sprintf(":%d", f.web[j].target))
		if err != nil {
			return err
		}
		s.mu.Lock()
		s.l = l
		s.mu.Unlock()
		go s.serve(l)
	}
	pc, err := f.hosts[i].ListenPacket("udp", fmt.Sprintf(":%d", f.dns.target))
	if err != nil {
		return err
	}
	f.sockets[i] = pc
	go f.packets.serve(pc)
	return nil
}

// silence closes an endpoint's ports and resets its connections.
func (f *fuzz) silence(i int) {
	for _, s := range f.servers[i] {
		s.kill()
	}
	_ = f.sockets[i].Close()
}

// list makes hosts the endpoints of all Services.
func (f *fuzz) list(hosts []*netns.Host) {
	for _, o := range append(f.web, f.dns) {
		changed := *o
		for _, h := range hosts {
			changed.endpoints = append(changed.endpoints, endpoint{host: h, node: "backend"})
		}
		f.p.put(&changed)
	}
}

// destinations are a Service's addresses.
func (f *fuzz) destinations(o *object) []netip.AddrPort {
	var list []netip.AddrPort
	for _, a := range append(append([]string{}, o.vips...), o.externalIPs...) {
		list = append(list, netip.AddrPortFrom(netip.MustParseAddr(a), o.port))
	}
	for _, a := range []netip.Addr{f.lab.Node.IPv4, f.lab.Node.IPv6} {
		list = append(list, netip.AddrPortFrom(a, o.nodePort))
	}
	return list
}

// script derives a talk. The first talks stay open until the stop.
func (f *fuzz) script(id uint32) *fuzzTalk {
	if id <= fuzzHeld {
		k := heldTalk(f.seed, id, fuzzClients, len(f.targets))
		f.servable(k)
		return k
	}
	k := newFuzzTalk(f.seed, id, fuzzClients, len(f.targets))
	f.servable(k)
	return k
}

// servable excludes talks to destinations without a route from their client.
func (f *fuzz) servable(k *fuzzTalk) {
	const external4, external6 = 2, 3
	if k.from == nodeClient && (k.to == external4 || k.to == external6) {
		k.to -= 2
	}
}

// dial connects from an address and port that no other connection of the round
// has, so that its record can be found.
func (f *fuzz) dial(d *net.Dialer, client int, network string, to netip.AddrPort) (own netip.AddrPort, conn net.Conn, err error) {
	const first, last = 33000, 60999
	h := f.clients[client]
	a := h.IPv6
	if to.Addr().Is4() {
		a = h.IPv4
	}
	for range 100 { // the proxy's sockets use ports of the node too
		own = netip.AddrPortFrom(a, uint16(first+f.ports[client].Add(1)%(last-first+1)))
		d.LocalAddr = net.TCPAddrFromAddrPort(own)
		if network == "udp" {
			d.LocalAddr = net.UDPAddrFromAddrPort(own)
		}
		if conn, err = h.Dialer(d, network, to.String()); !errors.Is(err, syscall.EADDRINUSE) {
			break
		}
	}
	return own, conn, err
}

func (f *fuzz) meet(k *fuzzTalk) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.met[k.id]++
	if k.up.end != endHeld {
		f.served++
	}
}

func (f *fuzz) tell(k *fuzzTalk, o fuzzOutcome) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.outcomes[k.id] = o
	if k.up.end != endHeld {
		f.served--
	}
}

// quiet waits until the endpoints' sides of all talks have ended, except those
// that stay open until the stop.
func (f *fuzz) quiet() {
	if err := wait.Poll(fuzzPatience, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.served > 0 {
			return errNotYet
		}
		return nil
	}); err != nil {
		f.differs("%s: %d talks have not ended at their endpoints", f.m.name, f.served)
	}
}

// differs reports a difference, with all that is known.
func (f *fuzz) differs(format string, args ...any) {
	f.total.differences.Add(1)
	f.mu.Lock()
	f.wrong++
	n := f.wrong
	f.mu.Unlock()
	if n <= 10 {
		f.t.Errorf(format, args...)
	}
}

// run attacks for some time, stops the proxy and judges.
func (f *fuzz) run(lasts, rest time.Duration) {
	ctx, cancel := context.WithTimeout(context.Background(), lasts)
	defer cancel()
	var held, work sync.WaitGroup
	for range fuzzHeld {
		id := f.next.Add(1)
		held.Go(func() { f.talk(id) })
	}
	for range fuzzWorkers {
		work.Go(func() {
			for ctx.Err() == nil {
				f.talk(f.next.Add(1))
				time.Sleep(rest)
			}
		})
	}
	for range fuzzSessions {
		work.Go(func() {
			for ctx.Err() == nil {
				f.session(f.next.Add(1))
			}
		})
	}
	f.faults.run(ctx)
	work.Wait()
	f.quiet()
	f.p.stop()
	held.Wait()
	wait.True(f.t, "the endpoints' sides have ended", func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return len(f.outcomes) == len(f.met)
	})
	f.judge()
}

// talk plays one connection.
func (f *fuzz) talk(id uint32) {
	k := f.script(id)
	to := f.targets[k.to]
	result := fuzzResult{talk: k, began: time.Now()}
	defer func() {
		result.over = time.Now()
		f.mu.Lock()
		f.results = append(f.results, result)
		f.mu.Unlock()
	}()
	d := &net.Dialer{Timeout: fuzzPatience / 2, Control: control(k.mss, k.up.sndbuf, k.up.rcvbuf)}
	d.SetMultipathTCP(false)
	var conn net.Conn
	var err error
	result.client, conn, err = f.dial(d, k.from, "tcp", to)
	if err != nil {
		result.mine.err, result.ended = err, time.Now()
		result.connected = errors.Is(err, syscall.ECONNRESET) // it was connected for a moment
		return
	}
	result.connected = true
	c := conn.(*net.TCPConn)
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(fuzzPatience))
	_, err = c.Write(binary.BigEndian.AppendUint32(nil, id))
	var ack [greetingDown]byte
	if err == nil {
		_, err = io.ReadFull(c, ack[:])
	}
	result.ended = time.Now()
	if err != nil {
		result.mine.err = err
		return
	}
	result.greeted, result.server = true, int(ack[0])
	_ = c.SetDeadline(f.deadline(k))
	result.mine = k.up.play(c, &k.down, rand.New(rand.NewPCG(f.seed, uint64(id))))
}

// deadline is when a side gives up a talk that begins now.
func (f *fuzz) deadline(k *fuzzTalk) time.Time {
	switch {
	case k.up.end == endHeld:
		return time.Now().Add(fuzzRound + 3*fuzzPatience)
	case k.resets():
		return time.Now().Add(fuzzPatience / 2)
	}
	return time.Now().Add(fuzzPatience)
}

// session plays one UDP session.
func (f *fuzz) session(id uint32) {
	r := rand.New(rand.NewPCG(f.seed, uint64(id)))
	s := &fuzzSession{id: id, from: r.IntN(fuzzClients), to: r.IntN(len(f.lookups))}
	s.began = time.Now()
	own, conn, err := f.dial(&net.Dialer{}, s.from, "udp", f.lookups[s.to])
	if err == nil {
		s.client = own
		f.packets.playSession(s, conn.(*net.UDPConn))
		_ = conn.Close()
	}
	s.ended = time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sessions = append(f.sessions, s)
}

// judge compares what clients and servers saw with each other and with the
// records.
func (f *fuzz) judge() {
	f.mu.Lock()
	results, sessions := f.results, f.sessions
	f.mu.Unlock()
	type key struct {
		protocol string
		client   netip.AddrPort
	}
	records := map[key][]record{}
	for _, r := range f.p.records() {
		k := key{r.Protocol, r.Client}
		records[k] = append(records[k], r)
		f.total.records.Add(1)
	}
	for _, result := range results {
		k := key{"TCP", result.client}
		f.judgeTalk(result, records[k])
		delete(records, k)
	}
	for _, s := range sessions {
		k := key{"UDP", s.client}
		f.judgeSession(s, records[k])
		delete(records, k)
	}
	for k, list := range records {
		if !f.faults.probed(k.client) {
			f.differs("%d records of %v, which no talk had: %+v", len(list), k, list[0])
		}
	}
	if f.unnoticed > 3+len(results)/50 {
		f.differs("%s: %d of %d talks waited in vain for a reset", f.m.name, f.unnoticed, len(results))
	}
	for _, text := range f.packets.wrong {
		f.differs("%s", text)
	}
}

// judgeTalk is judge for one talk.
func (f *fuzz) judgeTalk(result fuzzResult, records []record) {
	k := result.talk
	f.mu.Lock()
	server, told := f.outcomes[k.id]
	met := f.met[k.id]
	f.mu.Unlock()
	about := func(err error) {
		f.differs("%s: %v\n%v\nclient %v %s to %v: %v\nserver: %v\nrecords: %+v\nfaults: %s", f.m.name, err, k,
			result.client, result.began.Format(clock), f.targets[k.to], result.mine, server, records, f.faults.around(result.began, result.over))
	}
	f.total.connections.Add(1)
	f.total.bytes.Add(int64(server.got + result.mine.got))
	if met > 1 {
		about(fmt.Errorf("its greeting came to %d endpoints", met))
		return
	}
	if !result.greeted {
		f.total.connections.Add(-1)
		f.total.failed.Add(1)
		if !f.faults.excuses(result) {
			about(errors.New("it could not be made"))
		}
		if len(records) > 1 || result.connected && len(records) == 0 {
			about(fmt.Errorf("%d records", len(records)))
		}
		return
	}
	switch {
	case len(records) != 1:
		about(fmt.Errorf("%d records", len(records)))
		return
	case !told:
		about(errors.New("its endpoint did not end"))
		return
	}
	if k.resets() {
		f.total.resets.Add(1)
	}
	err := k.judge(result.mine, server)
	if err == nil {
		err = k.compare(records[0], result.mine, server)
	}
	switch {
	case errors.Is(err, errUnnoticed):
		f.unnoticed++
		f.total.unnoticed.Add(1)
	case err != nil:
		about(err)
	}
}

// judgeSession is judge for one session.
func (f *fuzz) judgeSession(s *fuzzSession, records []record) {
	f.packets.mu.Lock()
	got, twice := 0, f.packets.twice[s.id]
	for _, size := range f.packets.got[s.id] {
		got += size
	}
	f.packets.mu.Unlock()
	f.total.sessions.Add(1)
	f.total.datagrams.Add(int64(s.sent))
	f.total.answers.Add(int64(s.answered))
	quiet := s.from != farClient && !f.faults.during(s.began, s.ended, afterEffect, "kill", "flush", "descriptors", "endpoints")
	for _, r := range records {
		if r.Endpoint.Addr() == f.hosts[farServer].IPv4 || r.Endpoint.Addr() == f.hosts[farServer].IPv6 {
			quiet = false
		}
	}
	if err := s.judge(records, got, twice, quiet); err != nil {
		f.differs("%s: UDP session %d, %v %s to %v: %v\n%+v\nrecords: %+v\nfaults: %s", f.m.name, s.id, s.client, s.began.Format(clock), f.lookups[s.to], err, *s, records, f.faults.around(s.began, s.ended))
	}
}

const clock = "15:04:05.000"
