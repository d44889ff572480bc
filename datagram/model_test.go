package datagram

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

// These tests compare the table of sessions, with its bounds, classes and timeouts, with
// a list that is searched completely.

const (
	modelPorts   = 5
	modelClients = 40
	modelMost    = 24 // sessions in all
	modelEach    = 16 // of one Service
	modelTimeout = 30 * int64(time.Second)
	modelStream  = 120 * int64(time.Second)
)

// modelled is a session in the model.
type modelled struct {
	key         key
	service     int
	endpoint    netip.AddrPort
	start, last int64
	turn        int // of its last datagram
	class       class
}

func (m *modelled) timeout() int64 {
	if m.class == stream {
		return modelStream
	}
	return modelTimeout
}

// game applies each operation to both.
type game struct {
	t           *testing.T
	worker      *worker
	services    [modelPorts]*portService
	replySocket *replySocket
	ends        map[key]conntrack.End // of what ended in this step
	model       []modelled
	now         int64
	turn        int
}

func newGame(t *testing.T) *game {
	g := &game{t: t, ends: make(map[key]conntrack.End)}
	loop := must.Get(poll.New())(t)
	t.Cleanup(loop.Stop)
	table := conntrack.NewTable(conntrack.Options{})
	s := New(Options{
		Config: Config{MaxSessions: modelMost, MaxServiceSessions: modelEach, Timeout: time.Duration(modelTimeout), StreamTimeout: time.Duration(modelStream)},
		Loops:  []*poll.Loop{loop}, Table: table,
	})
	g.worker = s.workers[0]
	g.replySocket = &replySocket{worker: g.worker, listens: true}
	for i := range g.services {
		name := service.PortName{Name: service.Name{Namespace: fmt.Sprint(modelNamespaceOf(modelServiceOf(i))), Name: fmt.Sprint(modelServiceOf(i))}, Port: fmt.Sprint(i), Protocol: service.UDP}
		p, err := newPortService(&service.Port{Name: name}, &s.options.Config, table.Counters(name), s.workers, s.joinGroups(name.Name))
		must.OK(t, err)
		g.services[i] = p
	}
	return g
}

func modelKey(service, client int) key {
	return key{
		client: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, 0, byte(client)}), 1000),
		vip:    netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(service)}), 53),
	}
}

func modelEndpoint(i int) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, byte(i)}), 53)
}

// step applies one operation; what and which select it.
func (g *game) step(what, which byte) {
	g.turn++
	svc := int(which) % modelPorts
	k := modelKey(svc, int(which)/modelPorts%modelClients)
	switch what % 8 {
	case 0, 1, 2, 3: // a client's datagram
		g.datagram(svc, k, int(what/8))
	case 4, 5: // an answer
		if c := g.worker.sessions[k]; c != nil {
			c.sessions.touch(c, g.now, true)
		}
		if m := g.find(k); m != nil {
			g.used(m, true)
		}
	case 6: // time
		g.now += int64(which) * int64(time.Second) / 4
		for i := range g.services {
			g.services[i].sessions[0].expire(g.now)
		}
		g.model = slices.DeleteFunc(g.model, func(m modelled) bool { return m.last+m.timeout() <= g.now })
	case 7: // an endpoint of a service is removed
		gone := modelEndpoint(int(what/8) % 3)
		g.worker.cut(&cut{service: g.services[svc], endpoints: map[netip.AddrPort]struct{}{gone: {}}})
		g.model = slices.DeleteFunc(g.model, func(m modelled) bool { return m.service == svc && m.endpoint == gone })
	}
	g.compare()
}

func (g *game) find(k key) *modelled {
	for i := range g.model {
		if g.model[i].key == k {
			return &g.model[i]
		}
	}
	return nil
}

func (g *game) used(m *modelled, answer bool) {
	m.last, m.turn = g.now, g.turn
	switch {
	case m.class == unanswered && answer:
		m.class = answered
	case m.class == answered && g.now-m.start >= streamAge:
		m.class = stream
	}
}

func (g *game) datagram(svc int, k key, endpoint int) {
	w, h := g.worker, &g.services[svc].sessions[0]
	if c := w.sessions[k]; c != nil {
		c.sessions.touch(c, g.now, false)
		g.used(g.find(k), false)
		return
	}
	w.makeRoom(h)
	g.makeRoom(svc)
	c := w.enter(h, g.replySocket, k, g.now)
	c.record.Endpoint = &service.Endpoint{Addr: modelEndpoint(endpoint % 3)}
	g.model = append(g.model, modelled{key: k, service: svc, endpoint: c.record.Endpoint.Addr, start: g.now, last: g.now, turn: g.turn})
}

// modelServiceOf returns the Service of a port: the first two ports belong to one
// Service, the next two to another.
func modelServiceOf(port int) int { return port / 2 }

// modelNamespaceOf returns the namespace of a Service: the first two Services share
// one.
func modelNamespaceOf(service int) int { return service / 2 }

// makeRoom says what may have made room: the oldest answered session, else the
// oldest, of its own namespace where that has its part, else of one that has most;
// there of the Service itself where it has its part, else of one that has most; and
// among its ports, of one that has most.
func (g *game) makeRoom(svc int) {
	count := func(of func(m modelled) bool) (n int) {
		for _, m := range g.model {
			if of(m) {
				n++
			}
		}
		return n
	}
	port := func(i int) int { return count(func(m modelled) bool { return m.service == i }) }
	whole := func(s int) int {
		return count(func(m modelled) bool { return modelServiceOf(m.service) == s })
	}
	// Of several ports that have most, it is the one that lost a session.
	evict := func(s int) {
		most := 0
		for i := range modelPorts {
			if modelServiceOf(i) == s {
				most = max(most, port(i))
			}
		}
		for i := range modelPorts {
			if modelServiceOf(i) == s && port(i) == most && g.services[i].sessions[0].count < most {
				g.evict(i)
				return
			}
		}
		g.t.Fatalf("no port with most sessions made room for one of port %d", svc)
	}
	own := modelServiceOf(svc)
	for whole(own) >= modelEach {
		evict(own)
	}
	// Of several that have most, it is the one that lost a session.
	lost := func(s int) bool { return g.services[2*s].sessions[0].group.count < whole(s) }
	inNamespace := func(n int) int {
		return count(func(m modelled) bool { return modelNamespaceOf(modelServiceOf(m.service)) == n })
	}
	for len(g.model) >= modelMost {
		namespaces, most := 0, 0
		for n := range modelNamespaceOf(modelServiceOf(modelPorts-1)) + 1 {
			if held := inNamespace(n); held > 0 {
				namespaces++
				most = max(most, held)
			}
		}
		mine := modelNamespaceOf(own)
		full := inNamespace(mine)*namespaces >= modelMost
		before := len(g.model)
		for n := 0; n <= modelNamespaceOf(modelServiceOf(modelPorts-1)) && len(g.model) == before; n++ {
			if full && n != mine || !full && inNamespace(n) != most {
				continue
			}
			services, largest := 0, 0
			for s := range modelServiceOf(modelPorts-1) + 1 {
				if held := whole(s); held > 0 && modelNamespaceOf(s) == n {
					services++
					largest = max(largest, held)
				}
			}
			if held := whole(own); n == mine && held > 0 && held*services >= inNamespace(n) {
				if lost(own) {
					evict(own)
				}
				continue
			}
			for s := range modelServiceOf(modelPorts-1) + 1 {
				if modelNamespaceOf(s) == n && whole(s) == largest && lost(s) {
					evict(s)
					break
				}
			}
		}
		if len(g.model) == before {
			g.t.Fatalf("nobody with most sessions made room for one of port %d", svc)
		}
	}
}

func (g *game) evict(svc int) {
	var of []modelled
	for _, m := range g.model {
		if m.service == svc {
			of = append(of, m)
		}
	}
	oldest := slices.MinFunc(of, func(a, b modelled) int {
		first := func(m modelled) int {
			if m.class == unanswered {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(first(a), first(b)), cmp.Compare(a.last, b.last), cmp.Compare(a.class, b.class), cmp.Compare(a.turn, b.turn))
	})
	g.model = slices.DeleteFunc(g.model, func(m modelled) bool { return m.key == oldest.key })
}

// compare checks that both have the same sessions, and that the table's counters and
// lists are consistent.
func (g *game) compare() {
	g.t.Helper()
	w := g.worker
	if len(w.sessions) != len(g.model) || w.count != len(g.model) {
		g.t.Fatalf("step %d: %d sessions, counted %d, want %d", g.turn, len(w.sessions), w.count, len(g.model))
	}
	for i := range g.model {
		m := &g.model[i]
		c := w.sessions[m.key]
		if c == nil {
			g.t.Fatalf("step %d: no session %v", g.turn, m.key)
		}
		if c.class != m.class || c.last != m.last || c.record.Endpoint.Addr != m.endpoint {
			g.t.Fatalf("step %d: session %v is of class %d, last %d; want %d, %d", g.turn, m.key, c.class, c.last, m.class, m.last)
		}
	}
	active := make(map[*group]int)
	for i := range g.services {
		h := &g.services[i].sessions[0]
		n := 0
		for class := range h.lists {
			var before *session
			for c := h.lists[class].head; c != nil; before, c = c, c.next {
				n++
				if c.prev != before || before != nil && before.last > c.last || int(c.class) != class {
					g.t.Fatalf("step %d: list %d of service %d is out of order", g.turn, class, i)
				}
			}
			if h.lists[class].tail != before {
				g.t.Fatalf("step %d: the tail of list %d of service %d is lost", g.turn, class, i)
			}
		}
		if n != h.count {
			g.t.Fatalf("step %d: service %d counts %d sessions and lists %d", g.turn, i, h.count, n)
		}
		if n > 0 {
			active[h.group] += n
			if o := h.group.namespace; w.active[o.index] != o || o.groups[h.group.index] != h.group || h.group.members[h.index] != h {
				g.t.Fatalf("step %d: service %d is not at its place", g.turn, i)
			}
		}
	}
	for of, n := range active {
		if of.count != n {
			g.t.Fatalf("step %d: a Service counts %d sessions and has %d", g.turn, of.count, n)
		}
	}
	listed, counted := 0, 0
	for _, n := range w.active {
		listed += len(n.groups)
		counted += n.count
	}
	if len(active) != listed || counted != w.count || g.replySocket.users != w.count {
		g.t.Fatalf("step %d: %d Services are active, listed %d; namespaces count %d of %d sessions; the replySocket has %d users", g.turn, len(active), listed, counted, w.count, g.replySocket.users)
	}
}

// Sessions behave as in a slow model, including their timeouts (A8.8).
func TestSessionsAgainstAModel(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint("seed=", seed), func(t *testing.T) {
			g := newGame(t)
			random := rand.New(rand.NewPCG(seed, 6))
			for range 3000 {
				what, which := byte(random.UintN(256)), byte(random.UintN(256))
				if what%8 == 6 && seed%2 == 0 {
					which %= 4 // time passes slowly
				}
				g.step(what, which)
			}
		})
	}
}

func FuzzSessions(f *testing.F) {
	f.Add([]byte("a client, its answer, some time"))
	f.Add([]byte{0, 1, 4, 1, 6, 200, 0, 1, 4, 1, 7, 1})
	f.Fuzz(func(t *testing.T, ops []byte) {
		g := newGame(t)
		for i := 0; i+1 < min(len(ops), 4000); i += 2 {
			g.step(ops[i], ops[i+1])
		}
	})
}

// The copies for the case of a closed endpoint stay within their bounds, and are equal to
// the datagrams that were sent.
func TestHeldStaysWithinBounds(t *testing.T) {
	g := newGame(t)
	h := &g.worker.unacked
	random := rand.New(rand.NewPCG(6, 6))
	var sessions [300]session
	want := make(map[*session][][]byte)
	content := make([]byte, 2<<16) // that datagrams are pieces of
	for i := range content {
		content[i] = byte(random.Uint32())
	}
	for range 20000 {
		s := &sessions[random.IntN(len(sessions))]
		switch random.IntN(4) {
		case 0:
			h.drop(s)
		default:
			p := content[random.IntN(1<<16):][:[]int{0, 40, 1200, 9000, 65507}[random.IntN(5)]]
			before := s.unacked.count()
			h.keep(s, p, 0)
			all := s.unacked.count() > before
			used := 0
			for _, d := range want[s] {
				used += len(d)
			}
			if fits := len(want[s]) < unackedDatagrams && used+len(p) <= unackedBytes; s.unacked != nil && all && !fits {
				t.Fatalf("kept %d bytes after %d datagrams of %d", len(p), len(want[s]), used)
			}
			if all {
				want[s] = append(want[s], p)
			}
		}
		total := 0
		for i := range sessions {
			s := &sessions[i]
			if s.unacked == nil {
				delete(want, s)
				continue
			}
			total += len(s.unacked.data)
		}
		if total != h.total || total > unackedTotal {
			t.Fatalf("%d bytes are copied, counted %d, at most %d", total, h.total, unackedTotal)
		}
	}
	for s, list := range want {
		must.Equalf(t, s.unacked.n, len(list), "datagrams are copied")
		for i, p := range list {
			if string(s.unacked.datagram(i)) != string(p) {
				t.Fatalf("datagram %d differs", i)
			}
		}
	}
}

func TestSessionIsSmall(t *testing.T) {
	const most = 480 // a size class of the allocator; the promise is 1 KiB, with the event loop's part, the socket's and the table's
	if got := sessionSize; got > most {
		t.Errorf("a session takes %d bytes, want at most %d", got, most)
	}
	t.Logf("%d bytes", sessionSize)
}

const sessionSize = unsafe.Sizeof(session{})
