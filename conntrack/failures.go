package conntrack

import (
	"context"
	"net/netip"
	"slices"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// failuresKept is how many failures each shard keeps.
const failuresKept = 256

// Failure is a failed attempt to connect to an endpoint, a connection that its endpoint
// broke, or packets that were refused or dropped.
type Failure struct {
	At       time.Time
	ID       uint64 // of the connection
	Client   netip.AddrPort
	Port     *service.Port
	Endpoint *service.Endpoint // nil if the attempt had none
	Duration time.Duration
	Error    DialError
	// Broke is how the connection ended that the endpoint broke (see End.ByEndpoint),
	// after Duration; then Error has no meaning.
	Broke End
	// Packets is not 0 if packets of the client to VIP were refused or dropped; Broke says
	// why.
	Packets uint64
	VIP     netip.AddrPort
}

// Reason returns the name of the error, or of how the endpoint broke the connection.
func (f *Failure) Reason() string {
	if f.Broke != EndNone {
		return f.Broke.String()
	}
	return f.Error.String()
}

// failures are the last failures of a shard. The ring is allocated at the
// first one.
type failures struct {
	ring []Failure
	next int
}

// add stores a failed attempt of a connection.
func (f *failures) add(r *Record, a *Attempt) {
	f.put(Failure{
		At: time.Unix(0, r.Wall+r.attemptStart-r.Start+a.Duration), ID: r.ID, Client: r.Client, Port: r.Port,
		Endpoint: a.Endpoint, Duration: time.Duration(a.Duration), Error: a.Error,
	})
}

// addBroken stores a connection that its endpoint broke.
func (f *failures) addBroken(r *Record) {
	f.put(Failure{
		At: time.Unix(0, r.Wall+r.Duration), ID: r.ID, Client: r.Client, Port: r.Port,
		Endpoint: r.Endpoint, Duration: time.Duration(r.Duration), Broke: r.End,
	})
}

func (f *failures) put(e Failure) {
	if f.ring == nil {
		f.ring = make([]Failure, 0, failuresKept)
	}
	if len(f.ring) < failuresKept {
		f.ring = append(f.ring, e)
		return
	}
	f.ring[f.next] = e
	f.next = (f.next + 1) % failuresKept
}

// Failures returns the last failures of all shards, newest first.
func (t *Table) Failures(ctx context.Context, post Post) ([]Failure, error) {
	var all []Failure
	for i := range t.shards {
		s := &t.shards[i]
		copied := make(chan []Failure, 1)
		if !post(i, func() { copied <- slices.Clone(s.failures.ring) }) {
			return nil, errLoopStopped
		}
		select {
		case ring := <-copied:
			all = append(all, ring...)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	all = append(all, t.refused.failures()...)
	slices.SortFunc(all, func(a, b Failure) int { return b.At.Compare(a.At) })
	return all, nil
}
