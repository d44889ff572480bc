package conntrack

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// maxFailedListed bounds Record.Failed.
const maxFailedListed = 16

// Record describes one connection from its acceptance to its end. It is plain
// data that is embedded in the connection's own state; except for the methods
// of Shard only its owner, on its event loop, touches it.
//
// Moments are nanoseconds of one monotonic clock, the event loop's; all times
// that are counted from the acceptance.
type Record struct {
	// ID is unique while the process runs. Open sets it.
	ID uint64
	// Start is when the connection was accepted, monotonic ns.
	Start int64
	// Wall is the same moment as Unix time in ns. Open sets it.
	Wall int64

	Client netip.AddrPort
	VIP    netip.AddrPort // the destination that the client connected to

	// Port is the service port; nil only if it is not known.
	Port *service.Port
	// Endpoint is the one that the connection was made to, or else the one
	// tried last; nil if none was tried.
	Endpoint *service.Endpoint
	// SourceAddr is the address and port that the connection to the endpoint
	// comes from; not valid before there is one.
	SourceAddr netip.AddrPort
	// Counters are the service port's; nil if there are none.
	Counters *Counters
	// Owner is the connection that the record belongs to, for those who find
	// it in the table; copies that are handed on do not have it. It may be a
	// Refresher.
	Owner any

	// Failed lists the attempts that failed, in order; nil while none has. It
	// is bounded: after the first 15 only the last one is kept.
	Failed []Attempt

	// ConnectTime is the time from acceptance until an endpoint answered, all
	// attempts included. It has a meaning only if Connected.
	ConnectTime int64
	// FirstByte is the time from acceptance until the endpoint's first byte, 0
	// if there was none.
	FirstByte int64
	// Duration is the time from acceptance to the end.
	Duration int64

	BytesFromClient   uint64 // that were passed on to the endpoint
	BytesFromEndpoint uint64 // that were passed on to the client
	// The same in datagrams; 0 unless the protocol has such.
	DatagramsFromClient   uint64
	DatagramsFromEndpoint uint64

	// attemptStart is when the attempt under way began.
	attemptStart int64
	// counted are the bytes that Counters know of.
	countedFromClient, countedFromEndpoint uint64
	// countedDatagrams are those, from client and endpoint, that Counters know
	// of; differences do not mind that the number begins anew.
	countedDatagrams [2]uint32

	prev, next *Record // in the shard's list

	Attempts  uint16 // begun, the one under way included
	Protocol  service.Protocol
	Kind      service.AddressKind
	Source    policy.Source     // whose address the endpoint sees
	Affinity  balancer.Affinity // what session affinity did
	End       End
	Connected bool // an endpoint answered
	// Quiet keeps the record from being handed on at its end; it is counted
	// all the same.
	Quiet bool
	state recordState
}

// Refresher is an Owner that can bring the record of its connection up to date
// while it is open, such as by Progress. It is called on the connection's event
// loop.
type Refresher interface {
	Refresh(*Record)
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
	recordMarker // a place in the list, not a connection
)

// Attempt is an attempt to connect that failed.
type Attempt struct {
	Endpoint *service.Endpoint
	Duration int64 // ns
	Error    DialError
}

// BeginAttempt notes that the endpoint is being dialled.
func (r *Record) BeginAttempt(ep *service.Endpoint, now int64) {
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
}

// AttemptFailed notes that the attempt under way failed.
func (r *Record) AttemptFailed(reason DialError, now int64) {
	a := Attempt{Endpoint: r.Endpoint, Duration: now - r.attemptStart, Error: reason}
	if len(r.Failed) < maxFailedListed {
		r.Failed = append(r.Failed, a)
	} else {
		r.Failed[maxFailedListed-1] = a
	}
	if r.Counters != nil {
		r.Counters.failed[min(reason, DialOther)].Add(1)
	}
}

// AttemptSucceeded notes that the endpoint answered.
func (r *Record) AttemptSucceeded(now int64) {
	r.Connected = true
	r.ConnectTime = now - r.Start
	if r.Counters != nil {
		r.Counters.connect.observe(r.ConnectTime)
	}
}

// Progress notes how many bytes have been passed on so far, so that listings
// and counters show connections that live long. It may be called at any time,
// or never.
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
	if r.Protocol == service.UDP {
		r.Counters.countDatagrams(r)
	}
}
