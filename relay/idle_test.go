package relay

import (
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestIdle: a link is idle once nothing has moved for a time. It is not while bytes wait to be
// read, written or acknowledged, either way, or a side has closed. Release sends each side a
// FIN.
func TestIdle(t *testing.T) {
	const quietFor = 10 * second
	for what, busy := range map[string]func(p *play, i int){
		"moved a moment ago": func(p *play, i int) { p.elapse(2 * quietFor); p.peerSends(i, 10); p.settle(); p.elapse(quietFor - 1) },
		"unread":             func(p *play, i int) { p.elapse(2 * quietFor); p.peerSends(i, 10) },
		"not acknowledged":   func(p *play, i int) { p.elapse(2 * quietFor); p.socks[i].pending = true },
		"closed":             func(p *play, i int) { p.peerCloses(i, false); p.settle(); p.elapse(2 * quietFor) },
		"blocked": func(p *play, i int) {
			p.socks[1-i].room = 0
			p.peerSends(i, 10)
			p.settle()
			p.elapse(2 * quietFor)
		},
	} {
		for i := range 2 {
			p := quiet(Config{})
			busy(p, i)
			check.Equalf(t, p.link.Idle(time.Duration(quietFor)), 0, "%s, side %d: idle for", what, i)
		}
	}
	p := quiet(Config{})
	p.peerSends(client, 10)
	p.settle()
	p.elapse(quietFor)
	must.Equalf(t, p.link.Idle(time.Duration(quietFor)), time.Duration(quietFor), "a quiet link is idle for")
	p.worker.Release(p.link)
	p.wantEnds(t, Released)
	for _, s := range p.socks {
		if !s.closed || !s.inOrder {
			t.Errorf("side %d: closed %v, in order %v", s.side, s.closed, s.inOrder)
		}
	}
}
