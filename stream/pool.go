package stream

import (
	"sync/atomic"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
)

// pool is what one service port needs while it serves: its balancer, its counters
// and its limits. It lives as long as the port keeps its name, whatever else
// changes. Safe for concurrent use, except port.
type pool struct {
	port     *service.Port // as of the last Apply; the Server's
	balancer *balancer.Balancer
	counters *conntrack.Counters

	streams            uint16 // of SCTP associations, each way; the Server's
	service, namespace *quota
	dialing            atomic.Int64 // connections that have no endpoint yet
	waiting            []queued     // connections in the Service's queue, in order; guarded by its mu
	queued             atomic.Int32 // their number
	held               atomic.Int32 // connections that await endpoints
	asked              atomic.Int64 // when NeedEndpoints was last called; 0 = never
}

// configure takes over a new or changed port. The problem is what its annotations
// say wrongly, or nil.
func (p *pool) configure(port *service.Port, defaults balancer.Options) (problem error) {
	opts, problem := defaults.For(port)
	opts.Loads, opts.Now = p.counters.Loads(), poll.Nanotime()
	if p.port = port; p.balancer == nil {
		p.balancer = balancer.New(opts)
	} else {
		p.balancer.Configure(opts)
	}
	return problem
}
