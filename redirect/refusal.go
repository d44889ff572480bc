package redirect

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/service"
)

// Reason is why a packet was refused or dropped.
type Reason uint8

// The reasons.
const (
	NoEndpoints      Reason = iota // the destination is in Plan.Refuse, or lingers (A3.4)
	NoLocalEndpoints               // it is in Plan.Silent (A3.5)
	UnknownPort                    // another port of an address in Plan.ClusterIPs (A3.12)
	UnknownAddress                 // another address of Plan.Local (A3.12)
	Reasons          = iota
)

// Refusal counts the packets without a connection that a client sent to a destination where
// they were refused or dropped.
type Refusal struct {
	Client      netip.Addr
	Destination service.Destination
	Reason      Reason
	Packets     uint64
}

// MaxRefusals bounds the clients and destinations that a Counter tells apart between two
// calls of Refused.
const MaxRefusals = 4096

// Refused is what a Counter has counted.
type Refused struct {
	// Totals counts all packets by reason since the Redirector was opened.
	Totals [Reasons]uint64
	// New are those since the last call, by client and destination, as far as there was
	// room for them.
	New []Refusal
}

// With adds what another Counter has counted.
func (r Refused) With(more Refused) Refused {
	for reason, n := range more.Totals {
		r.Totals[reason] += n
	}
	r.New = append(r.New, more.New...)
	return r
}

// Counter is a Redirector that counts what is refused and dropped where that happens.
type Counter interface {
	// Refused returns what was counted. It is safe for concurrent use.
	Refused() (Refused, error)
}
