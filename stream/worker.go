package stream

import (
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/message"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/upstream"
)

// spareConns bounds the memory that is kept for later connections.
const spareConns = 1024

// worker is the Server's part of one event loop. Everything in it belongs to that
// loop; other goroutines reach it by post only.
type worker struct {
	server    *Server
	loop      *poll.Loop
	relay     *relay.Worker
	messages  *message.Worker
	dialer    *upstream.Dialer
	shard     *conntrack.Shard
	acceptors map[*socket]*acceptor

	neighbours kernel.Neighbours

	retries retries
	headers headerReader
	held    map[*conn]struct{} // connections that await endpoints

	until map[*conn]int64 // when those that waited at a limit are to have got a place, monotonic ns

	stalled    []stalled
	stallTimer poll.Timer

	paused     []*acceptor
	pauseTimer poll.Timer
	backoff    time.Duration

	spare [service.SCTP + 1][]*conn // by protocol
}

func newWorker(s *Server, l Loop, d *upstream.Dialer, shard *conntrack.Shard) *worker {
	w := &worker{
		server: s, loop: l.Poll, relay: l.Relay, messages: l.Messages, dialer: d, shard: shard,
		acceptors: make(map[*socket]*acceptor), retries: newRetries(), held: make(map[*conn]struct{}),
		until: make(map[*conn]int64),
	}
	w.post(func() { w.loop.AtTick(w.giveTurns) })
	return w
}

// post runs f on the worker's loop.
func (w *worker) post(f func()) { w.loop.Post(f) }

// newConn returns an empty connection.
func (w *worker) newConn(protocol service.Protocol) *conn {
	var c *conn
	spare := w.spare[protocol]
	if n := len(spare); n > 0 {
		c = spare[n-1]
		spare[n-1] = nil
		w.spare[protocol] = spare[:n-1]
	} else if protocol == service.SCTP {
		c = newSCTPConn()
	} else {
		c = newTCPConn()
	}
	c.worker = w
	c.upstream = -1
	return c
}

// freeConn takes back a connection that has ended. Nothing refers to it any more:
// its registrations are gone and its timer is cancelled.
func (w *worker) freeConn(c *conn) {
	protocol, f := c.record.Protocol, c.carrier
	delete(w.until, c)
	f.clear()
	*c = conn{carrier: f}
	if spare := w.spare[protocol]; len(spare) < spareConns {
		w.spare[protocol] = append(spare, c)
	}
}

// stop ends accepting and all connections, and writes their records.
func (w *worker) stop() {
	w.loop.Cancel(&w.pauseTimer)
	for s := range w.acceptors {
		w.drop(s)
	}
	w.retries = newRetries()
	w.loop.Cancel(&w.stallTimer)
	w.stalled = nil
	w.neighbours.Close()
	w.shard.Each(func(r *conntrack.Record) {
		if c, is := r.Owner.(*conn); is {
			c.abort()
		}
	})
	w.shard.Flush()
}

// abortAll aborts the connections of a protocol, also those that wait for their turn to
// be dialled, or for room.
func (w *worker) abortAll(protocol service.Protocol) {
	w.retries.forget(protocol)
	w.stalled = slices.DeleteFunc(w.stalled, func(s stalled) bool { return s.conn.record.Protocol == protocol })
	w.shard.Each(func(r *conntrack.Record) {
		if c, is := r.Owner.(*conn); is && r.Protocol == protocol {
			c.abort()
		}
	})
}
