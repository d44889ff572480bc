package relay

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestTurnQueueAgainstModel runs the line beside a slice that is searched.
func TestTurnQueueAgainstModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	var q turnQueue
	var model []turnEntry
	links := make([]Link, 20)
	for range 20_000 {
		l, i := &links[rng.IntN(len(links))], rng.IntN(2)
		switch rng.IntN(5) {
		case 0, 1:
			q.add(l, i)
			if e := (turnEntry{l, uint8(i)}); !slices.Contains(model, e) {
				model = append(model, e)
			}
		case 2, 3:
			if q.empty() {
				break
			}
			l, i := q.next()
			must.Equalf(t, (turnEntry{l, uint8(i)}), model[0], "next")
			model = model[1:]
		default:
			if rng.IntN(4) == 0 {
				q.remove(l)
				l.sides[client].state, l.sides[endpoint].state = 0, 0
				model = slices.DeleteFunc(model, func(e turnEntry) bool { return e.link == l })
			}
		}
		if !slices.Equal(q.line[q.head:], model) || q.empty() != (len(model) == 0) {
			t.Fatalf("the line is %v, want %v", q.line[q.head:], model)
		}
	}
	if cap(q.line) > 4*2*len(links) {
		t.Fatalf("room for %d in the line of %d at most", cap(q.line), 2*len(links))
	}
}

// TestUrgentByteThatNoEventTellsOf: on a line that reorders, bytes can arrive
// before the mark that points to them. Reads stop at it all the same.
func TestUrgentByteThatNoEventTellsOf(t *testing.T) {
	for _, bytes := range []int{100, 500 << 10} { // copied, spliced
		p := quiet(Config{Splice: true})
		p.socks[client].quiet = true
		p.peerReads(endpoint, 1<<20)
		p.peerSends(client, bytes)
		p.peerSendsUrgent(client)
		p.peerSends(client, 100)
		p.peerCloses(client, false)
		p.settle()
		p.peerCloses(endpoint, false)
		p.settle()
		p.wantEnds(t, ClientFin)
		p.checkEnd(t)
	}
}

// TestUrgentByteBeforeAReset: splice gives the error of a reset at the urgent byte,
// with bytes of the stream behind it.
func TestUrgentByteBeforeAReset(t *testing.T) {
	p := quiet(Config{Splice: true})
	p.peerSends(client, 500<<10)
	p.settle()
	if p.link.sides[client].state&moving == 0 {
		t.Fatal("the direction is not busy")
	}
	p.meddle = func() {
		p.meddle = func() {}
		p.peerSendsUrgent(client)
		p.peerSends(client, 100)
		p.peerResets(client, sys.ECONNRESET)
	}
	p.peerReads(endpoint, 1<<20)
	p.peerSends(client, 100<<10)
	p.settle()
	p.wantEnds(t, ClientReset)
	p.checkEnd(t)
}
