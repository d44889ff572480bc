package conntrack

import (
	"net/netip"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// maxFailedListed bounds Record.Failed.
const maxFailedListed = 16

// Record describes one connection from its acceptance to its end. It is embedded in
// the connection's state. Except for the methods of Shard, only the connection's
// event loop accesses it.
//
// Start and all now parameters are nanoseconds of the event loop's monotonic clock.
// All other times are nanoseconds since the acceptance.
type Record struct {
	// ID is unique while the process runs. Open sets it.
	ID uint64
	// Start is when the connection was accepted, monotonic ns.
	Start int64
	// Wall is Start as Unix time in ns. Open sets it if it is 0.
	Wall int64

	Client netip.AddrPort
	VIP    netip.AddrPort // the client's destination
	// self is the node, if it is the client, the load balancer that names the client, and how
	// long the connection has waited; nil for most. Open sets it.
	self *self

	// Port is the service port; nil if it is unknown.
	Port *service.Port
	// Endpoint is the connected endpoint, or else the one tried last; nil without
	// an attempt.
	Endpoint *service.Endpoint
	// SourceAddr is the local address and port of the connection to the endpoint.
	// It is invalid before that connection exists.
	SourceAddr netip.AddrPort
	// Counters are the service port's counters, or nil.
	Counters *Counters
	// Owner is the connection of the record, for users of the table. It may implement
	// Refresher, Ender and Inspector. Copies do not have it: some have what Transport
	// returns.
	Owner any

	// Failed lists the failed attempts in order; nil without any. After the first
	// 15, it keeps only the last one.
	Failed []Attempt

	// ConnectTime is the time until an endpoint answered, including failed
	// attempts. It is valid only if Connected is set.
	ConnectTime int64
	// FirstByte is the time until the endpoint's first byte, or 0.
	FirstByte int64
	// Duration is the time until the end.
	Duration int64

	BytesFromClient   uint64 // forwarded to the endpoint
	BytesFromEndpoint uint64 // forwarded to the client
	// The same in datagrams, or messages of SCTP; 0 for TCP. The Event Refused has its packets
	// in DatagramsFromClient.
	DatagramsFromClient   uint64
	DatagramsFromEndpoint uint64

	// attemptStart is the start of the current attempt; once the connection is
	// announced, the time of its last Lasts record.
	attemptStart int64
	// counted are the bytes that are included in Counters.
	countedFromClient, countedFromEndpoint uint64
	// countedDatagrams are the datagrams or messages from client and endpoint that are included
	// in Counters. Subtraction survives wrap-around.
	countedDatagrams [2]uint32

	looked *looked // nil if nobody has looked

	load       *balancer.Load // of the endpoint, while the connection counts there
	shard      *Shard         // nil before Open and in copies
	prev, next *Record        // in the shard's list

	Attempts uint16 // including the current one
	// Streams of an SCTP client's association.
	StreamsFromClient, StreamsToClient uint16

	Protocol  service.Protocol
	Kind      service.AddressKind
	Source    policy.Source     // whose address the endpoint sees
	Affinity  balancer.Affinity // what session affinity did
	End       End
	Path      Path // the data path
	Connected bool // whether an endpoint answered
	// Event is the moment that a copy describes.
	Event Event
	// Quiet keeps the record out of the access log. Counters and taps still have
	// the connection.
	Quiet bool
	state recordState
}

// BeginWait notes that the connection waits before it is dialled: for a PROXY header, for an
// endpoint or for a place.
func (r *Record) BeginWait(now int64) { r.setWaited(r.waited() - (now - r.Start)) }

// EndWait ends what BeginWait began.
func (r *Record) EndWait(now int64) { r.setWaited(r.waited() + (now - r.Start)) }

// setWaited replaces self, as copies of the record share it.
func (r *Record) setWaited(ns int64) {
	s := &self{waited: ns}
	if r.self != nil {
		s.name, s.via = r.self.name, r.self.via
	}
	r.self = s
}

func (r *Record) waited() int64 {
	if r.self == nil {
		return 0
	}
	return r.self.waited
}

// WaitTime returns how long the connection has waited before it was dialled, in ns. That of
// a copy includes a wait that lasts.
func (r *Record) WaitTime() int64 {
	if w := r.waited(); w >= 0 {
		return w
	}
	return max(r.waited()+r.Duration, 0)
}

// ClientNode returns this node's name if the client is the node itself, else "".
func (r *Record) ClientNode() string {
	if r.self == nil {
		return ""
	}
	return r.self.name
}

// Via returns the load balancer that named the client by the PROXY protocol; invalid if
// none did.
func (r *Record) Via() netip.AddrPort {
	if r.self == nil {
		return netip.AddrPort{}
	}
	return r.self.via
}

// NamedBy notes that the open connection's peer is a load balancer, which names the client.
func (r *Record) NamedBy(via, client netip.AddrPort) {
	named := &self{via: via, waited: r.waited()}
	if own := r.shard.table.selfAt(client.Addr()); own != nil {
		named.name = own.name
	}
	r.Client, r.self = client, named
}

// Refresher is an Owner that can update the record of its open connection, for
// example by Progress. It is called on the connection's event loop.
type Refresher interface {
	Refresh(*Record)
}

// Ender is an Owner whose connection can be ended from outside.
type Ender interface {
	// EndConnection ends the connection, or has it end as soon as that is possible.
	// It is called on the connection's event loop.
	EndConnection(End)
}

// Idler is an Owner that knows whether its connection is idle. It is called on the
// connection's event loop.
type Idler interface {
	// IdleFor reports whether nothing has moved for a time, and nothing is under way.
	IdleFor(atLeast time.Duration) bool
}

func (r *Record) refresh() {
	if owner, ok := r.Owner.(Refresher); ok {
		owner.Refresh(r)
	}
}

type recordState uint8

const (
	recordNew recordState = iota
	recordOpen
	recordClosed
	recordMarker // a position in the list, not a connection
)

// Attempt is a failed attempt to connect.
type Attempt struct {
	Endpoint *service.Endpoint
	Duration int64 // ns
	Error    DialError
}

// BeginAttempt records the start of an attempt.
func (r *Record) BeginAttempt(ep *service.Endpoint, now int64) { r.BeginAttemptBelow(0, ep, now) }

// BeginAttemptBelow is BeginAttempt, unless the endpoint has most connections. 0 means any
// number.
func (r *Record) BeginAttemptBelow(most int, ep *service.Endpoint, now int64) bool {
	r.release()
	if r.Counters != nil {
		load := r.Counters.loads.Of(ep.Addr)
		if !load.BeginBelow(most) {
			return false
		}
		r.load = load
	}
	r.Endpoint = ep
	r.attemptStart = now
	if r.Attempts < ^uint16(0) {
		r.Attempts++
	}
	if r.Counters != nil {
		r.Counters.attempts.Add(1)
		if r.Attempts == 2 {
			r.Counters.retried.Add(1)
		}
	}
	return true
}

// outcome is what the connection's end says about the endpoint.
func (r *Record) outcome() balancer.Outcome {
	switch {
	case r.End != EndpointReset && r.End != EndpointAbort:
		return balancer.Served
	case r.BytesFromEndpoint == 0:
		return balancer.Unserved
	}
	return balancer.Reset
}

// Resume counts a connection at its endpoint that an earlier process began.
func (r *Record) Resume() {
	if r.Counters != nil && r.Endpoint != nil && r.load == nil {
		r.load = r.Counters.loads.Of(r.Endpoint.Addr)
		r.load.Begin()
	}
}

// release stops counting the connection at its endpoint.
func (r *Record) release() {
	if r.load != nil {
		r.load.End()
		r.load = nil
	}
}

// AttemptFailed records the failure of the current attempt.
func (r *Record) AttemptFailed(reason DialError, now int64) {
	if r.load != nil && !reason.Own() {
		r.Counters.loads.Refused(r.load, now)
	}
	r.release()
	a := Attempt{Endpoint: r.Endpoint, Duration: r.Attempting(now), Error: reason}
	if len(r.Failed) < maxFailedListed {
		r.Failed = append(r.Failed, a)
	} else {
		r.Failed[maxFailedListed-1] = a
	}
	if r.Counters != nil {
		r.Counters.outcome().failed[min(reason, DialOther)].Add(1)
	}
	if r.shard != nil {
		r.shard.failures.add(r, &a)
	}
}

// Attempting returns how long the current attempt has lasted, in ns.
func (r *Record) Attempting(now int64) int64 { return now - r.attemptStart }

// AttemptSucceeded records that the endpoint answered.
func (r *Record) AttemptSucceeded(now int64) {
	r.Connected = true
	r.ConnectTime = now - r.Start
	if r.load != nil {
		r.Counters.loads.Answered(r.load, time.Duration(now-r.attemptStart), now)
	}
	if r.Counters != nil {
		r.Counters.outcome().connect.observe(r.ID, r.ConnectTime)
	}
	r.Announce(now)
}

// Announce says that the connection has its endpoint. AttemptSucceeded calls it;
// transports without an answer from the endpoint call it themselves.
func (r *Record) Announce(now int64) {
	r.attemptStart = now
	if s := r.shard; s != nil && s.table.opens.Load() {
		s.tell(r, Opened, now)
	}
}

// State returns the state of the connection.
func (r *Record) State() State {
	switch {
	case r.state == recordClosed || r.End != EndNone:
		return Closed
	case r.Connected || r.Protocol == service.UDP && r.Endpoint != nil:
		return Open
	}
	return Connecting
}

// Sampled reports whether the connection is among the one in n that a sample takes; it is
// the same for all records of a connection. Numbers of one loop are a multiple of the
// number of loops apart, so that remainders of the number itself would take all of them
// from some loops. n is not 0.
func (r *Record) Sampled(n uint64) bool { return scramble(r.ID)%n == 0 }

// scramble is the finalizer of splitmix64: each input bit affects all output bits.
func scramble(z uint64) uint64 {
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return z ^ z>>31
}

// looked is what Looked returns. Copies of the record share it, so it does not change.
type looked struct {
	fromClient, fromEndpoint uint64
	at                       int64
}

// Looked returns the bytes from client and endpoint at the last Look, and when that
// was in monotonic ns; 0 if there was none.
func (r *Record) Looked() (fromClient, fromEndpoint uint64, at int64) {
	if r.looked == nil {
		return 0, 0, 0
	}
	return r.looked.fromClient, r.looked.fromEndpoint, r.looked.at
}

// copyTo makes c a copy that may leave the loop. Failed is shared.
func (r *Record) copyTo(c *Record, e Event, now int64) {
	*c = *r
	c.Owner, c.load, c.shard, c.prev, c.next = nil, nil, nil, nil, nil
	c.Event = e
	if e != Ended {
		c.Duration = max(now-r.Start, 0)
	}
}

// Progress sets the number of bytes forwarded so far, so that listings and counters
// include long-lived connections. Calls are optional.
func (r *Record) Progress(fromClient, fromEndpoint uint64) {
	r.BytesFromClient, r.BytesFromEndpoint = fromClient, fromEndpoint
	r.countBytes()
}

func (r *Record) countBytes() {
	if r.Counters == nil {
		return
	}
	if n := r.BytesFromClient - r.countedFromClient; n != 0 {
		r.Counters.bytesFromClient.Add(n)
		r.countedFromClient = r.BytesFromClient
	}
	if n := r.BytesFromEndpoint - r.countedFromEndpoint; n != 0 {
		r.Counters.bytesFromEndpoint.Add(n)
		r.countedFromEndpoint = r.BytesFromEndpoint
	}
	if r.Protocol != service.TCP {
		r.Counters.countDatagrams(r)
	}
}
