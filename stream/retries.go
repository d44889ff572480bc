package stream

import (
	"slices"

	"github.com/sluice-proxy/sluice/service"
)

// attemptShare is how many attempts the connections of a loop make in one of its
// rounds, all together, not counting each connection's first.
const attemptShare = 16

// retries bounds the share of each round of a loop that is spent on further
// attempts. Beyond attemptShare, connections wait for their turn: service ports take
// turns, and each port's connections wait in order. So a Service whose endpoints all
// refuse delays its own connections only. It belongs to one loop.
type retries struct {
	left    int // in this round
	waiting map[*pool]*retryQueue
	turns   []*pool // the keys of waiting, in order
}

// retryQueue holds the connections of one service port that wait for their turn.
type retryQueue struct {
	head, tail *conn
}

func newRetries() retries {
	return retries{left: attemptShare, waiting: make(map[*pool]*retryQueue)}
}

// take reports whether one more attempt may be made in this round, and counts it.
func (r *retries) take() bool {
	if r.left == 0 {
		return false
	}
	r.left--
	return true
}

// push has a connection wait for its turn.
func (r *retries) push(c *conn) {
	q := r.waiting[c.pool]
	if q == nil {
		q = &retryQueue{head: c}
		r.waiting[c.pool] = q
		r.turns = append(r.turns, c.pool)
	} else {
		q.tail.next = c
	}
	q.tail = c
}

// pop returns the connection whose turn it is. There must be one.
func (r *retries) pop() *conn {
	p := r.turns[0]
	r.turns = r.turns[1:]
	q := r.waiting[p]
	c := q.head
	q.head, c.next = c.next, nil
	if q.head == nil {
		delete(r.waiting, p)
	} else {
		r.turns = append(r.turns, p)
	}
	return c
}

// forget forgets the waiting connections of a protocol.
func (r *retries) forget(protocol service.Protocol) {
	r.turns = slices.DeleteFunc(r.turns, func(p *pool) bool {
		is := r.waiting[p].head.record.Protocol == protocol // as all of a service port
		if is {
			delete(r.waiting, p)
		}
		return is
	})
}

// giveTurns runs at the end of each round of the loop: it makes the attempts that
// the round has room for.
func (w *worker) giveTurns() {
	r := &w.retries
	for len(r.turns) > 0 && r.take() {
		r.pop().retry()
	}
	r.left = attemptShare
	if len(r.turns) > 0 {
		w.loop.NoWait()
	}
}
