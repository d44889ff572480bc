package message

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/race"
)

// play is one link between the two sockets of a fake, and the obvious model of what must
// come of it. Whenever nothing happens any more: what one peer has sent is with the other
// one, whole, in order, with its information, but for one message while the other peer has
// no room; what is held is counted, and bounded. A shutdown is passed on after all that
// came before it; an error ends the other side, after that, too, unless it takes nothing
// any more; a message that is too large, or has a stream that was not granted, ends both
// sides in the same way.
type play struct {
	*fake
	relay  *Relay
	worker *Worker
	link   *Link
	ends   []End
	first  int // which side's shutdown or error came first; -1: none
	slow   bool
	number uint32
}

func (p *play) LinkEnded(end End) { p.ends = append(p.ends, end) }

const (
	playLargest = 300 << 10
	playStreams = 6
)

func newPlay(choose func(int) int, held int64) *play {
	p := &play{fake: newFake(choose), link: new(Link), first: -1}
	p.relay = New(Config{MaxMessage: playLargest, MaxHeld: held, IdleTimeout: time.Hour, CloseTimeout: time.Minute, DrainTimeout: 2 * time.Second})
	p.relay.kernel = p.fake
	p.worker = p.relay.newWorker(p.fake)
	return p
}

// move takes the link out of the loop in the middle of its work, and brings it back, to
// itself or as another process would.
func (p *play) move(t *testing.T) {
	t.Helper()
	m, ok := p.worker.Detach(p.link)
	if !ok {
		t.Fatal("the link cannot move")
	}
	if len(p.timers) > 0 || p.socks[0].handler != nil || p.socks[1].handler != nil {
		t.Fatal("a link that is out of the loop has a timer or a registration")
	}
	for range p.choose(5) {
		p.step()
	}
	if p.choose(3) == 0 {
		p.worker.Return(p.link, &m)
		return
	}
	var fds []int
	for i, fd := range m.FDs(nil) {
		if i >= len(p.socks) {
			fd = duplicate(t, fd)
		}
		fds = append(fds, fd)
	}
	said := must.Get(json.Marshal(&m))(t)
	p.shared, p.left = true, 0
	p.worker.Given(p.link, &m)
	p.shared = false
	if p.left != len(p.socks) || p.worker.stats.Open != 0 || p.relay.Held() != 0 {
		t.Fatalf("left: %d descriptors, %d links, %d bytes", len(p.socks)-p.left, p.worker.stats.Open, p.relay.Held())
	}
	var arrived Moved
	must.OK(t, json.Unmarshal(said, &arrived))
	must.OK(t, arrived.SetFDs(fds))
	p.worker = p.relay.newWorker(p.fake)
	p.worker.Attach(p.link, &arrived, p)
}

// duplicate is what sending a descriptor does.
func duplicate(t *testing.T, fd int) int {
	t.Helper()
	fd, err := syscall.Dup(fd)
	must.OK(t, err)
	return fd
}

// TestMovedThatMakesNoSense is what no process may take.
func TestMovedThatMakesNoSense(t *testing.T) {
	held := func(bytes int) []int {
		fd := must.Get(sys.WriteMemoryFile(make([]byte, bytes)))(t)
		t.Cleanup(func() { sys.Close(fd) })
		return []int{10, 11, fd}
	}
	for _, c := range []struct {
		what string
		side MovedSide
		fds  []int
	}{
		{"no endpoint", MovedSide{}, []int{10}},
		{"a descriptor too many", MovedSide{}, []int{10, 11, 12}},
		{"no held message", MovedSide{Held: 5}, []int{10, 11}},
		{"a shorter held message", MovedSide{Held: 5}, held(4)},
		{"a longer held message", MovedSide{Held: 5}, held(6)},
		{"a negative size", MovedSide{Held: -1}, held(1)},
		{"the beginning of a message without a byte", MovedSide{State: uint8(partial)}, held(1)},
	} {
		m := Moved{Sides: [2]MovedSide{c.side}}
		if m.SetFDs(c.fds) == nil {
			t.Errorf("%s: it is taken", c.what)
		}
	}
}

// step lets one of the peers do something.
func (p *play) step() {
	s := p.socks[p.choose(2)]
	if s.closed {
		return
	}
	ended := s.fin || s.err != 0 || s.done
	switch what := p.choose(100); {
	case len(s.in) > 0 && s.in[len(s.in)-1].arrived < len(s.in[len(s.in)-1].text):
		m := &s.in[len(s.in)-1]
		if what < 5 && !ended { // an abort in the middle of a message
			s.sent = s.sent[:len(s.sent)-1]
			if m.read == 0 {
				s.in = s.in[:len(s.in)-1]
			} else {
				*m = letter{kind: sys.SCTPPartLost}
			}
			p.fails(s, sys.ECONNRESET)
			return
		}
		m.arrived += 1 + p.choose(len(m.text)-m.arrived)
	case what < 50 && !ended && !s.shut:
		p.number++
		size := 1 + p.choose(2000)
		switch p.choose(30) {
		case 0:
			size = 1 + p.choose(playLargest)
		case 1:
			size = playLargest
		case 2:
			if p.choose(4) == 0 {
				size = playLargest + 1
			}
		}
		m := letter{info: sys.MessageInfo{PPID: p.number, Stream: uint16(p.choose(playStreams)), Unordered: p.choose(3) == 0}, text: make([]byte, size)}
		if p.choose(100) == 0 {
			m.info.Stream = playStreams
		}
		for i := 0; i < size; i += 97 {
			m.text[i] = byte(p.number) + byte(i>>8)
		}
		m.arrived = size
		if p.choose(4) == 0 {
			m.arrived = p.choose(size)
		}
		s.in, s.sent = append(s.in, m), append(s.sent, m)
	case what < 85:
		p.peerTakes(s, 1+p.choose(20))
	case what < 92 || ended:
		p.peerTakes(s, len(s.unread))
	case what < 95:
		if s.shut { // both at once
			s.in = append(s.in, letter{kind: sys.SCTPShutDown})
		}
		s.fin = true
		p.leaves(s)
	case what < 97:
		p.fails(s, sys.ECONNRESET)
	case what < 98:
		p.fails(s, sys.ETIMEDOUT)
	case what < 99:
		s.in = append(s.in, letter{kind: sys.SCTPOtherNotice})
	case p.choose(3) == 0:
		s.starved = !s.starved
		p.slow = true // what waits for memory may be late
	}
}

// fails has an association end by an error, of which a notice comes first: what its peer
// has not taken is lost.
func (p *play) fails(s *fakeSock, e sys.Errno) {
	s.in = append(s.in, letter{kind: sys.SCTPLost})
	s.err = e
	p.leaves(s)
}

// leaves notes that the peer of a side has ended.
func (p *play) leaves(s *fakeSock) {
	if p.first < 0 && !p.socks[1-s.side].gone() {
		p.first = s.side
	}
}

// dialling handles the events of a connecting socket for the owner.
type dialling struct{}

func (dialling) HandleEvents(uint8, poll.Events) {}

// gone tells whether the peer of a side has ended.
func (s *fakeSock) gone() bool { return s.fin || s.err != 0 || s.done }

func (p *play) run(t *testing.T) {
	for i, s := range p.socks {
		s.room = []int{1, 3000, 40 << 10, 400 << 10}[p.choose(4)]
		s.streams = playStreams
		s.side = i
	}
	if p.choose(8) == 0 {
		p.socks[p.choose(2)].streams = 2
	}
	for range p.choose(4) {
		p.step()
	}
	c, e := Socket{FD: 10, Streams: p.socks[0].streams}, Socket{FD: 11, Streams: p.socks[1].streams}
	if p.choose(2) == 0 {
		e.Reg, _ = p.Add(e.FD, 9, poll.Writable, dialling{})
	}
	p.worker.Start(p.link, c, e, p)
	p.quiet(t)
	for n := 20 + p.choose(150); n > 0 && len(p.ends) == 0; n-- {
		for range 1 + p.choose(3) {
			p.step()
		}
		if len(p.ends) == 0 && p.choose(12) == 0 {
			p.move(t)
		}
		p.quiet(t)
		if p.choose(40) == 0 && p.elapse() {
			p.slow = true // a timer may have ended what waited
			p.quiet(t)
		}
	}
	// In the end both peers take everything and shut down.
	for n := 0; len(p.ends) == 0; n++ {
		for _, s := range p.socks {
			if len(s.in) > 0 {
				m := &s.in[len(s.in)-1]
				m.arrived = len(m.text)
			}
			s.starved = false
			p.peerTakes(s, len(s.unread))
			if !s.gone() && !s.shut {
				s.fin = true
			}
		}
		if p.link.facts&starved != 0 {
			p.elapse()
		}
		p.quiet(t)
		if n > 10 && !p.elapse() || n > 1000 {
			t.Fatalf("the link does not end: %+v", p.link.sides)
		}
	}
}

// quiet runs the loop until nothing happens, and compares.
func (p *play) quiet(t *testing.T) {
	t.Helper()
	p.settle()
	if p.fault != "" {
		t.Fatal(p.fault)
	}
	for i, dst := range p.socks {
		p.checkDelivered(t, p.socks[1-i], dst)
	}
	if len(p.ends) > 0 {
		p.checkEnd(t)
		return
	}
	held := 0
	for i, src := range p.socks {
		dst, d := p.socks[1-i], &p.link.sides[i]
		held += d.reserved
		waits := d.held != nil && d.state&partial == 0
		switch complete := p.complete(src); {
		case dst.gone() || dst.shut || p.link.facts&(closing|draining) != 0:
		case dst.starved || p.link.facts&starved != 0:
		case src.err != 0 && src.raised && d.state&blocked == 0:
			t.Fatalf("side %d: its error did not end the link", i)
		case len(dst.got) < complete && dst.used < dst.room:
			t.Fatalf("side %d: %d of %d messages were passed on, and there is room", i, len(dst.got), complete)
		case waits && len(dst.got) == complete:
			t.Fatalf("side %d: all are passed on, and one is held", i)
		}
		must.Equalf(t, d.messages, uint64(len(dst.got)), "side %d: messages counted, %d sent", i, len(dst.got))
		if src.fin && len(src.in) == 0 && d.state&blocked == 0 && p.link.facts&draining == 0 && !dst.shut && !dst.gone() {
			t.Fatalf("side %d: its shutdown was not passed on", i)
		}
	}
	if p.relay.Held() != int64(held) || held > 2*playLargest || p.worker.stats.Open != 1 {
		t.Fatalf("%d bytes counted as held, %d are; %d links", p.relay.Held(), held, p.worker.stats.Open)
	}
}

// complete is how many of a peer's messages have arrived whole.
func (p *play) complete(s *fakeSock) int {
	n := len(s.sent)
	if len(s.in) > 0 {
		if m := s.in[len(s.in)-1]; m.kind == sys.SCTPMessage && m.arrived < len(m.text) {
			n--
		}
	}
	return n
}

// checkDelivered: the first of what was sent has arrived, as it was.
func (p *play) checkDelivered(t *testing.T, src, dst *fakeSock) {
	t.Helper()
	if len(dst.got) > len(src.sent) {
		t.Fatalf("side %d got %d messages of %d", dst.side, len(dst.got), len(src.sent))
	}
	for i, got := range dst.got {
		if want := src.sent[i]; got.info != want.info || !bytes.Equal(got.text, want.text) {
			t.Fatalf("side %d, message %d: %+v of %d bytes, want %+v of %d", dst.side, i, got.info, len(got.text), want.info, len(want.text))
		}
	}
}

func (p *play) checkEnd(t *testing.T) {
	t.Helper()
	if len(p.ends) != 1 || p.relay.Held() != 0 || p.worker.stats.Open != 0 || len(p.timers) != 0 {
		t.Fatalf("ended %v; left: %d bytes, %d links, %d timers", p.ends, p.relay.Held(), p.worker.stats.Open, len(p.timers))
	}
	c, e := p.socks[0], p.socks[1]
	if up, _ := p.link.FromClient(); up != uint64(e.taken) {
		t.Fatalf("%d messages of the client counted, %d sent", up, e.taken)
	}
	if down, _ := p.link.FromEndpoint(); down != uint64(c.taken) || (p.link.FirstMessage() != 0) != (down > 0) {
		t.Fatalf("%d messages of the endpoint counted, %d sent, the first at %d", down, c.taken, p.link.FirstMessage())
	}
	if !c.closed || !e.closed || c.handler != nil || e.handler != nil {
		t.Fatalf("closed: %v, %v", c.closed, e.closed)
	}
	end := p.ends[0]
	from := map[End]int{ClientShutdown: 0, ClientAbort: 0, ClientLost: 0, EndpointShutdown: 1, EndpointAbort: 1, EndpointLost: 1}
	i, sided := from[end]
	switch {
	case sided:
		src, dst := p.socks[i], p.socks[1-i]
		shutdown := end == ClientShutdown || end == EndpointShutdown
		if shutdown != (src.inOrder && dst.inOrder) && src.err == 0 && dst.err == 0 {
			t.Fatalf("%v, but closed in order: %v, %v", end, src.inOrder, dst.inOrder)
		}
		if !src.gone() {
			t.Fatalf("%v, but that side has not ended", end)
		}
		if end == ClientLost || end == EndpointLost {
			if src.err != sys.ETIMEDOUT {
				t.Fatalf("%v, but the error is %v", end, src.err)
			}
		}
		// What came before it was delivered, unless the other side had ended, or took
		// nothing for too long.
		if len(dst.got) < len(src.sent) && p.first == i && !p.slow && !dst.gone() {
			t.Fatalf("%v: %d of %d messages were passed on", end, len(dst.got), len(src.sent))
		}
	case end == TooLarge || end == NoStream:
		var wrong []string // of the directions whose next message does not fit
		for j, src := range p.socks {
			dst := p.socks[1-j]
			n := dst.taken
			if n == len(src.sent) {
				continue
			}
			m := src.sent[n]
			switch {
			case end == TooLarge && len(m.text) <= playLargest, end == NoStream && m.info.Stream < dst.streams:
			case len(dst.got) == n || p.slow || dst.gone():
				return
			default:
				wrong = append(wrong, fmt.Sprintf("side %d got %d messages, want the %d before it", dst.side, len(dst.got), n))
			}
		}
		t.Fatalf("%v, but no message is so: %v", end, wrong)
	case end == Idle && p.slow:
	case end == Limit && p.relay.config.MaxHeld < 1<<20:
	default:
		t.Fatalf("ended by %v", end)
	}
}

// TestLinkWaitsForTheKernelsMemory has epoll report a socket as writable that takes
// nothing: settle fails if the link spins.
func TestLinkWaitsForTheKernelsMemory(t *testing.T) {
	p := newPlay(func(int) int { return 1 }, playHeld[0])
	c, e := p.socks[client], p.socks[endpoint]
	for _, s := range p.socks {
		s.room, s.streams = 1<<20, playStreams
	}
	p.worker.Start(p.link, Socket{FD: 10, Streams: playStreams}, Socket{FD: 11, Streams: playStreams}, p)
	e.starved = true
	for i := range 5 {
		m := letter{info: sys.MessageInfo{PPID: uint32(i)}, text: make([]byte, 100+i), arrived: 100 + i}
		c.in, c.sent = append(c.in, m), append(c.sent, m)
	}
	const pauses = 20
	for range pauses {
		p.quiet(t)
		if !p.elapse() {
			t.Fatal("no timer is set to try again")
		}
	}
	p.quiet(t)
	if len(e.got) != 0 || len(p.ends) != 0 || e.calls < pauses || e.calls > 2*pauses {
		t.Fatalf("%d messages sent by %d calls in %d pauses, ended %v", len(e.got), e.calls, pauses, p.ends)
	}
	e.starved = false
	p.elapse()
	p.quiet(t)
	if len(e.got) != len(c.sent) {
		t.Fatalf("%d of %d messages were passed on once there was memory", len(e.got), len(c.sent))
	}
}

var playHeld = []int64{64 << 20, 500_000, 0}

// TestLinkAgainstModel plays many random scripts.
func TestLinkAgainstModel(t *testing.T) {
	scripts := uint64(race.Fewer(1500))
	for i, held := range playHeld {
		t.Run(fmt.Sprint(held), func(t *testing.T) {
			t.Parallel()
			ends := map[End]int{}
			for seed := range scripts {
				rng := rand.New(rand.NewPCG(seed, uint64(i)))
				p := newPlay(rng.IntN, held)
				if !t.Run(fmt.Sprint(seed), func(t *testing.T) { p.run(t) }) {
					return
				}
				ends[p.ends[0]]++
			}
			for end := ClientShutdown; end <= NoStream; end++ {
				if ends[end] == 0 && held > 0 { // else hardly any large message begins
					t.Errorf("no script ended by %v: %v", end, ends)
				}
			}
		})
	}
}

// FuzzLink lets the fuzzer write the script.
func FuzzLink(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("a script that is long enough to send, take, shut down and abort"))
	f.Fuzz(func(t *testing.T, script []byte) {
		rng := rand.New(rand.NewPCG(1, uint64(len(script))))
		held := playHeld[0]
		if len(script) > 0 {
			held = playHeld[int(script[0])%len(playHeld)]
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
		}, held).run(t)
	})
}

// patient is an owner whose links may be quiet for a time of its own.
type patient struct {
	*play
	quiet time.Duration
}

func (p patient) QuietFor(isHalfClosed bool, idle, half time.Duration) time.Duration {
	if isHalfClosed {
		return half
	}
	return min(p.quiet, idle)
}

// TestOwnersTimeout: the owner decides how long its link may be quiet.
func TestOwnersTimeout(t *testing.T) {
	p := newPlay(func(int) int { return 1 }, playHeld[0])
	for _, s := range p.socks {
		s.room, s.streams = 1<<20, playStreams
	}
	began := p.now
	p.worker.Start(p.link, Socket{FD: 10, Streams: playStreams}, Socket{FD: 11, Streams: playStreams}, patient{p, 10 * time.Second})
	for len(p.ends) == 0 {
		if !p.elapse() {
			t.Fatal("no timer is set to end the link")
		}
	}
	if quiet := time.Duration(p.now - began); p.ends[0] != Idle || quiet < 10*time.Second || quiet > 20*time.Second {
		t.Fatalf("ended %v after %v, want %v after 10s", p.ends, quiet, Idle)
	}
}
