package relay

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/race"
)

// play is one link between the two sockets of a fake, and the obvious model of
// what must come of it: whenever nothing happens any more, every byte that a
// peer sent is with the other peer, or that peer has no room and will say when
// it has; what the relay holds is bounded; a FIN has been passed on exactly when
// all before it was; and a reset has ended everything.
type play struct {
	*fake
	relay  *Relay
	worker *Worker
	link   *Link
	ends   []End

	first   int  // which side's FIN came first, with quiet after it; -1: not known
	budget  int  // steps that the peers may still take
	meddles bool // they take them between system calls too
	calm    bool // no resets
}

func (p *play) LinkEnded(l *Link, end End) { p.ends = append(p.ends, end) }

func newPlay(choose func(int) int, config Config) *play {
	p := &play{fake: newFake(choose), first: -1, link: new(Link)}
	p.relay = New(config)
	p.relay.kernel = p.fake.kernel()
	p.worker = p.relay.newWorker(p.fake)
	p.meddle = func() {
		if p.meddles && p.budget > 0 && p.choose(3) == 0 {
			p.step()
		}
	}
	return p
}

// step lets one of the peers do something.
func (p *play) step() {
	p.budget--
	i := p.choose(2)
	if p.socks[i].closed {
		return
	}
	switch what := p.choose(100); {
	case what < 25:
		p.peerSends(i, 1+p.choose(300))
	case what < 45:
		// Not so much that it takes the other side for ever to read it.
		most := []int{200 << 10, 2 << 20}[p.choose(2)]
		p.peerSends(i, min(p.choose(most), 50*p.socks[1-i].capacity))
	case what < 75:
		p.peerReads(i, p.choose(p.socks[i].capacity+1))
	case what < 87:
		p.peerReads(i, p.socks[i].capacity)
	case what < 89:
		p.peerSendsUrgent(i)
	case what < 95:
		p.peerCloses(i, false)
	case p.calm:
	case what < 96:
		p.peerCloses(i, true)
	case what < 98:
		p.peerResets(i, sys.ECONNRESET)
	case what < 99:
		p.peerResets(i, sys.ETIMEDOUT)
	}
}

// run plays a script to its end: some links, one after the other.
func (p *play) run(t *testing.T) {
	for range 1 + p.choose(3) {
		p.newSocks()
		p.ends, p.first = nil, -1
		p.runLink(t)
	}
	if p.relay.Pipes()*2 != len(p.pipes) {
		t.Fatalf("%d pipes counted, %d descriptors of pipes open", p.relay.Pipes(), len(p.pipes))
	}
	p.worker.Close()
	if len(p.pipes) != 0 || p.relay.Pipes() != 0 {
		t.Fatalf("%d descriptors of pipes left", len(p.pipes))
	}
}

func (p *play) runLink(t *testing.T) {
	small := []int{1, 100, 5000, 30 << 10, 200 << 10, 1 << 20}
	for _, s := range p.socks {
		s.capacity = small[p.choose(len(small))]
		s.room = s.capacity
	}
	p.meddles = p.choose(2) == 0
	p.calm = p.choose(2) == 0
	p.noPipes = p.choose(5) == 0
	p.budget = 10 + p.choose(150)
	for range p.choose(5) {
		p.step()
	}
	if !p.open() {
		return
	}
	p.settle()
	p.check(t)
	for p.budget > 0 && len(p.ends) == 0 {
		for range 1 + p.choose(3) {
			p.step()
		}
		if p.choose(6) == 0 {
			p.move(t)
		}
		p.settle()
		p.check(t)
	}
	p.meddles = false
	// In the end both peers read everything and close.
	for n := 0; len(p.ends) == 0; n++ {
		for i := range p.socks {
			p.peerCloses(i, false)
			p.peerReads(i, p.socks[i].capacity)
		}
		p.settle()
		p.check(t)
		if n > 3_000_000 {
			t.Fatal("the link does not end")
		}
	}
}

// open starts the link in one of the ways in which an owner may, if it would.
func (p *play) open() bool {
	c, e := Socket{FD: p.socks[client].fd}, Socket{FD: p.socks[endpoint].fd}
	if p.choose(2) == 0 {
		e.Reg, _ = p.Add(e.FD, 9, Watch, dialling{})
		p.socks[endpoint].edge = false
		e.Ready = p.socks[endpoint].state()
		if e.Ready&poll.Failed != 0 {
			return false // the endpoint is not there: no link
		}
	}
	if p.choose(2) == 0 {
		if e := p.worker.Probe(p.link, c.FD, e.FD); e != 0 && e != sys.EAGAIN {
			// The endpoint is not there: no link.
			p.worker.Drop(p.link)
			if p.worker.stats.Held != 0 {
				p.failf("Drop leaves %d bytes", p.worker.stats.Held)
			}
			return false
		}
	}
	p.worker.Start(p.link, c, e, p)
	p.noWait = true // this was in the middle of a round
	return true
}

// move takes the link out of the loop in the middle of its work, and brings it back, to
// itself or as another process would.
func (p *play) move(t *testing.T) {
	t.Helper()
	m, ok := p.worker.Detach(p.link)
	if !ok {
		return
	}
	if len(p.timers) > 0 || p.socks[0].handler != nil || p.socks[1].handler != nil {
		t.Fatal("a link that is out of the loop has a timer or a registration")
	}
	for range p.choose(5) {
		p.step()
	}
	p.noWait = true // this was in the middle of a round
	if p.choose(3) == 0 {
		p.worker.Return(p.link)
		return
	}
	fds := m.FDs(nil)
	said := must.Get(json.Marshal(&m))(t)
	p.shared, p.left = true, 0
	p.worker.Given(p.link)
	p.shared = false
	if p.left != len(fds) || p.worker.stats.Open != 0 {
		t.Fatalf("%d of %d descriptors are closed, %d links", p.left, len(fds), p.worker.stats.Open)
	}
	var arrived Moved
	must.OK(t, json.Unmarshal(said, &arrived))
	must.OK(t, arrived.SetFDs(fds))
	p.link = new(Link)
	p.worker.Attach(p.link, &arrived, p)
}

// dialling handles the events of a connecting socket for the owner.
type dialling struct{}

func (dialling) HandleEvents(uint8, poll.Events) {}

// check compares the link with the model, at a moment when nothing happens.
func (p *play) check(t *testing.T) {
	t.Helper()
	if p.fault != "" {
		t.Fatal(p.fault)
	}
	if len(p.ends) > 0 {
		p.checkEnd(t)
		return
	}
	st := &p.worker.stats
	inHand := 0
	for i, src := range p.socks {
		dst, d := p.socks[1-i], &p.link.sides[i]
		held := src.read - dst.got
		switch {
		case src.reset || dst.reset:
			t.Fatalf("a reset did not end the link")
		case held > 0 && !dst.refused:
			t.Fatalf("direction %d: %d bytes are held, and there is room", i, held)
		case held > max(bufferSize, p.relay.config.PipeSize):
			t.Fatalf("direction %d: %d bytes are held", i, held)
		case held == 0 && src.read < src.sent:
			t.Fatalf("direction %d: %d bytes are not read, none are held", i, src.sent-src.read)
		case dst.shut != (src.fin && held == 0):
			t.Fatalf("direction %d: FIN came %v, %d bytes are held, FIN passed on %v", i, src.fin, held, dst.shut)
		case d.bytes != uint64(dst.got):
			t.Fatalf("direction %d: %d bytes counted, %d written", i, d.bytes, dst.got)
		case (d.pipe != nil) != (d.inPipe > 0) || (d.held != nil || d.pipe != nil) != (held > 0):
			t.Fatalf("direction %d: %d bytes are held, chunk %v, pipe %v with %d", i, held, d.held != nil, d.pipe != nil, d.inPipe)
		}
		if d.held != nil {
			inHand += held
		}
	}
	if !p.worker.turns.empty() || st.Held != uint64(inHand) || st.Open != 1 {
		t.Fatalf("turns waiting %v, %d bytes counted as held of %d, %d links", !p.worker.turns.empty(), st.Held, inHand, st.Open)
	}
	if c, e := p.socks[client].fin, p.socks[endpoint].fin; c != e && p.first < 0 {
		p.first = client
		if e {
			p.first = endpoint
		}
	}
}

func (p *play) checkEnd(t *testing.T) {
	t.Helper()
	if len(p.ends) != 1 {
		t.Fatalf("ended %v", p.ends)
	}
	l, st, end := p.link, &p.worker.stats, p.ends[0]
	if st.Open != 0 || st.Held != 0 || !p.worker.turns.empty() || len(p.timers) != 0 {
		t.Fatalf("left: %d links, %d bytes, %d timers, turns %v", st.Open, st.Held, len(p.timers), !p.worker.turns.empty())
	}
	for i, s := range p.socks {
		if d := &l.sides[i]; !s.closed || d.held != nil || d.pipe != nil || d.reg.Valid() {
			t.Fatalf("side %d: closed %v, %+v", i, s.closed, d)
		}
	}
	up, down := p.socks[endpoint].got, p.socks[client].got
	if l.BytesUp() != uint64(up) || l.BytesDown() != uint64(down) {
		t.Fatalf("counted %d up, %d down; written %d, %d", l.BytesUp(), l.BytesDown(), up, down)
	}
	if read := p.socks[endpoint].read; (l.FirstByte != 0) != (read > 0) {
		t.Fatalf("first byte %d, %d bytes", l.FirstByte, read)
	}
	c, e := p.socks[client], p.socks[endpoint]
	switch end {
	case ClientFin, EndpointFin:
		if !c.fin || !e.fin || !c.inOrder || !e.inOrder || up != c.sent || down != e.sent {
			t.Fatalf("%v, but the client closed %v, was closed in order %v, %d of %d up; the endpoint %v, %v, %d of %d down",
				end, c.fin, c.inOrder, up, c.sent, e.fin, e.inOrder, down, e.sent)
		}
		if p.first >= 0 && (end == ClientFin) != (p.first == client) {
			t.Fatalf("%v, but side %d closed first", end, p.first)
		}
	case ClientReset, ClientTimeout:
		p.checkReset(t, c, e)
	case EndpointReset, EndpointTimeout:
		p.checkReset(t, e, c)
	default:
		t.Fatal(end)
	}
}

// checkReset: the side that was not reset is, and it got before that what the
// other had sent, unless it took no more.
func (p *play) checkReset(t *testing.T, lost, other *fakeSock) {
	t.Helper()
	if !lost.reset || other.inOrder {
		t.Fatalf("side %d was reset: %v; the other was told: %v", lost.side, lost.reset, !other.inOrder)
	}
	if other.got != lost.sent && !other.cut && !other.reset && !other.deaf {
		t.Fatalf("side %d sent %d bytes before its reset, %d were passed on", lost.side, lost.sent, other.got)
	}
}

var playConfigs = []Config{
	{},
	{Splice: true},
	{Splice: true, PipeSize: 64 << 10},
	{Splice: true, MaxPipes: -1},
	{Splice: true, IdleTimeout: time.Hour, EndpointLiveness: sys.Liveness{Count: 1}, GoneAfter: time.Minute},
}

// TestLinkAgainstModel plays many random scripts.
func TestLinkAgainstModel(t *testing.T) {
	scripts := uint64(race.Fewer(1000))
	for i, config := range playConfigs {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			for seed := range scripts {
				rng := rand.New(rand.NewPCG(seed, uint64(i)))
				if !t.Run(fmt.Sprint(seed), func(t *testing.T) {
					newPlay(rng.IntN, config).run(t)
				}) {
					return
				}
			}
		})
	}
}

// FuzzLink lets the fuzzer write the script.
func FuzzLink(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("a script that is long enough to send, read, close and reset"))
	f.Fuzz(func(t *testing.T, script []byte) {
		rng := rand.New(rand.NewPCG(1, uint64(len(script))))
		config := playConfigs[0]
		if len(script) > 0 {
			config = playConfigs[int(script[0])%len(playConfigs)]
			script = script[1:]
		}
		newPlay(func(n int) int {
			if len(script) < 2 {
				return rng.IntN(n)
			}
			v := int(script[0])<<8 | int(script[1])
			script = script[2:]
			if n > 1<<16 {
				v <<= 4
			}
			return v % n
		}, config).run(t)
	})
}
