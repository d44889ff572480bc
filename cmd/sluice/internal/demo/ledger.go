package demo

import (
	"net/netip"
	"time"
)

// visit is what a client saw of one connection.
type visit struct {
	client   int // index of the client, below 0 for the node itself
	service  *shopService
	vip      netip.AddrPort
	from     netip.AddrPort // the client's end; not valid if connect failed
	answer   string         // the name that answered
	sent     uint64         // bytes
	received uint64
	took     time.Duration // from connect to the first whole answer
	err      error
}

func (v *visit) key() key { return key{v.from, v.vip} }

// connected tells that there was a connection, so that the log has to know it.
func (v *visit) connected() bool { return v.from.IsValid() }

// ledger is what the clients saw of all connections. A connect that is refused
// where it should be made no connection: it is counted apart. The ledger belongs
// to the goroutine that plays the story.
type ledger struct {
	visits  []*visit
	refused int
}

func (l *ledger) add(v *visit) { l.visits = append(l.visits, v) }

// keys names the connections that were made, as the log should know them.
func (l *ledger) keys() []key { return keysOf(l.visits) }

func keysOf(visits []*visit) []key {
	var list []key
	for _, v := range visits {
		if v.connected() {
			list = append(list, v.key())
		}
	}
	return list
}

// tally is the sum of a demo: connections = answered + failed.
type tally struct {
	connections int
	answered    int // the client got its whole answer
	retried     int // of them, those for which an endpoint had not answered
	failed      int
	refused     int // connects that were refused as they should be; not in connections
}

// tally adds up what clients saw; retried tells what the log says of a
// connection.
func (l *ledger) tally(retried func(key) bool) tally {
	t := tally{connections: len(l.visits), refused: l.refused}
	for _, v := range l.visits {
		switch {
		case v.err != nil:
			t.failed++
			continue
		case retried(v.key()):
			t.retried++
		}
		t.answered++
	}
	return t
}
