package node

import (
	"context"
	"errors"
	"net"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/admin"
	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/handover"
	"github.com/sluice-proxy/sluice/health"
	"github.com/sluice-proxy/sluice/host/drops"
	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/internal/httpport"
	"github.com/sluice-proxy/sluice/internal/once"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/listener"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/serve"
	"github.com/sluice-proxy/sluice/live/socket"
	"github.com/sluice-proxy/sluice/message"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/relay"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/source/manifests"
	"github.com/sluice-proxy/sluice/stream"
	"github.com/sluice-proxy/sluice/web"
)

const (
	// stopPatience bounds how long a stop waits for the loops and for the access
	// log to take the last records.
	stopPatience = 5 * time.Second
	// flowsPatience is the same for flows, each of which is reset: 50,000 take a second.
	// Kubernetes and systemd allow 30 seconds in all.
	flowsPatience = 20 * time.Second
)

// Proxy is the whole of sluice run, wired together. Its rooms, in the order in
// which a change travels: source, store, policy, listeners, steering.
type Proxy struct {
	config Config
	log    zerolog.Logger

	source    Objects
	manifests *manifests.Watcher // the source, if it is a directory
	cluster   *kubernetes.Source // the source, if it is a cluster
	events    *kubernetes.Events // nil without a cluster
	store     *service.Store
	policy    policy.Config
	node      *nodeDoubt
	rank      *balancer.Rank // nil without a cluster: this node is alone
	table     *policy.Table  // the last one compiled; run's goroutine's
	manager   *listener.Manager
	stream    *stream.Server   // serves TCP and SCTP
	datagram  *datagram.Server // serves UDP
	drops     *drops.Watch
	flows     *flows      // nil if all is relayed from the start
	hasFlows  atomic.Bool // they serve, or are about to
	dataPath  atomic.Pointer[dataPath]
	steer     redirect.Redirector
	lock      *redirect.Lock

	before    *predecessor        // nil unless this process takes over from a running one
	offer     *handover.Offer     // to a later process; nil if it cannot be made
	successor *handover.Conn      // the process that has taken over; Run's goroutine's, like left
	left      bool                // another process steers and listens
	moves     bool                // successor takes open connections
	handing   chan struct{}       // has a value while another process takes over, and once this one ends
	replaced  chan *handover.Conn // to a process that waits for the end of this one
	waiting   *handover.Conn      // the same, once it has ended; Run's goroutine's
	managed   bool                // a service manager knows of the next process; written before successor and replaced
	serveRest func()              // serves what openRest has opened
	ports     ports               // of health checks and metrics

	hostWatcher *hostnet.Watcher
	host        atomic.Pointer[hostnet.State] // what policy says of this node's addresses and pods

	loops     []stream.Loop
	relay     *relay.Relay
	messages  *message.Relay
	conntrack *conntrack.Table
	accessLog *conntrack.Log // nil when it is off
	metrics   net.Listener   // of the metrics; nil without an address, and while that is taken
	pages     admin.Pages    // of the metrics
	totals    admin.Carried
	refusals  refusals
	sync      *admin.Sync     // nil without metrics
	past      *conntrack.Past // nil when none is kept
	view      *live.View      // nil if nobody can ask, as is history
	history   *live.History
	admin     *socket.Server // nil when it is off
	page      *web.Server    // nil without an address
	names     *names         // nil without a DNS server

	metricsConns   httpport.Group // of metrics
	started        time.Time
	verbosity      *logVerbosity // nil without an admin socket
	maxConnections int
	requests       chan func()            // of the admin socket, for run's goroutine
	steerChoice    string                 // why this mode steers
	mode           string                 // its name among choose.Names; "" if the next process is to choose again
	trackingLater  bool                   // Config.Tracking waits for connection tracking to be loaded; run's goroutine's
	toldReady      bool                   // the log says so; run's goroutine's
	keptTold       bool                   // whether the log says that connections are kept in connection tracking
	wrong          atomic.Pointer[string] // what is not in force, or nil
	fatal          chan error             // what --bind-address-hard-fail makes of a port that is taken
	health         *health.Server

	applied  atomic.Int64  // Unix time in ns of the last configuration that is wholly in force
	failures atomic.Uint64 // configurations that could not be applied wholly
	repairs  atomic.Uint64 // times that kernel state was restored
	noLocal  atomic.Pointer[admin.NoLocalEndpoints]

	drains     *serve.Drains // what sluice drain says
	changes    changes
	departed   *departed
	rebalancer *rebalancer
	reported   map[service.Problem]bool
	lines      once.Lines   // about problems, for each namespace
	trouble    once.Trouble // what notInForce said
	maintained time.Time    // when maintenance ended last; run's goroutine's
}

// onLoops posts to the loop of each shard of the table of connections.
func (p *Proxy) onLoops() conntrack.Post { return conntrack.OnLoops(p.allLoops()) }

// allLoops returns the loop of each shard.
func (p *Proxy) allLoops() (loops []*poll.Loop) {
	for _, l := range p.loops {
		loops = append(loops, l.Poll)
	}
	if p.flows != nil {
		loops = append(loops, p.flows.loop)
	}
	return loops
}

// within ends a part, and says in the log what it means if that takes too long.
func (p *Proxy) within(patience time.Duration, otherwise string, stop func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := stop(ctx); err != nil {
		p.log.Error().Err(err).Msg(otherwise)
	}
}

func servicePorts(s *service.Snapshot) int {
	n := 0
	for _, port := range s.Ports {
		if port != nil {
			n++
		}
	}
	return n
}

// onRun runs f on run's goroutine, which owns the configuration, and waits for it.
func (p *Proxy) onRun(ctx context.Context, f func()) error {
	done := make(chan struct{})
	select {
	case p.requests <- func() { defer close(done); f() }:
		<-done
		return nil
	case <-ctx.Done():
		return errors.New("the proxy starts or stops")
	}
}
