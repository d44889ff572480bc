package datagram

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/service"
)

// Annotations for UDP, without the prefix sluice.dev/.
const (
	timeoutAnnotation   = "udp-timeout"
	responsesAnnotation = "udp-responses"
)

// maxAttempts bounds how many refusing endpoints one session tries. The client's
// next datagram starts a session that skips them.
const maxAttempts = 16

// portService is a served UDP service port. It lives as long as the port has its
// name, across all other changes.
type portService struct {
	balancer *balancer.Balancer
	counters *conntrack.Counters
	terms    atomic.Pointer[terms]
	sessions []serviceSessions // by worker; each belongs to its loop
	group    *groups           // the Service's
	name     service.PortName

	port *service.Port // as of the last Apply; used by the Server only
}

// terms are the conditions that end a service port's sessions. They never change.
type terms struct {
	timeouts  [classes]int64 // ns
	responses uint32         // 0: unlimited
}

func newPortService(port *service.Port, cfg *Config, counters *conntrack.Counters, workers []*worker, g *groups) (*portService, error) {
	p := &portService{counters: counters, sessions: make([]serviceSessions, len(workers)), group: g, name: port.Name}
	for i := range p.sessions {
		p.sessions[i] = serviceSessions{service: p, worker: workers[i], group: &g.loops[i]}
	}
	return p, p.configure(port, cfg)
}

// configure applies a new or changed port. It ignores invalid values of annotations and
// returns an error about them.
func (p *portService) configure(port *service.Port, cfg *Config) error {
	opts, problem := cfg.Balancer.For(port)
	opts.Loads, opts.Now = p.counters.Loads(), poll.Nanotime()
	opts.Ejection = balancer.Ejection{} // nothing says that a UDP endpoint serves
	if p.port = port; p.balancer == nil {
		p.balancer = balancer.New(opts)
	} else {
		p.balancer.Configure(opts)
	}
	t := &terms{timeouts: [classes]int64{
		unanswered: int64(cfg.Timeout),
		answered:   int64(cfg.Timeout),
		stream:     int64(cfg.StreamTimeout),
	}}
	problems := []error{problem}
	if text, ok := port.Annotations[timeoutAnnotation]; ok {
		if d, err := parseTimeout(text); err == nil {
			t.timeouts = [classes]int64{int64(d), int64(d), int64(d)}
		} else {
			problems = append(problems, fmt.Errorf("annotation sluice.dev/%s: %w; it gets the default", timeoutAnnotation, err))
		}
	}
	if text, ok := port.Annotations[responsesAnnotation]; ok {
		if n, err := parseResponses(text); err == nil {
			t.responses = n
		} else {
			problems = append(problems, fmt.Errorf("annotation sluice.dev/%s: %w; sessions end by their timeout", responsesAnnotation, err))
		}
	}
	p.terms.Store(t)
	return errors.Join(problems...)
}

func parseTimeout(text string) (time.Duration, error) {
	d, err := time.ParseDuration(text)
	if err != nil || d < time.Millisecond || d > 24*time.Hour {
		return 0, fmt.Errorf("%q is not a duration such as 30s, of 1ms to 24h", text)
	}
	return d, nil
}

func parseResponses(text string) (uint32, error) {
	n, err := strconv.ParseUint(text, 10, 31)
	if err != nil {
		return 0, fmt.Errorf("%q is not a number", text)
	}
	return uint32(n), nil
}

// CheckAnnotation returns what is wrong with the value of an annotation of a Service,
// without the prefix sluice.dev/; nil for names that are not known here.
func CheckAnnotation(name, value string) (err error) {
	switch name {
	case timeoutAnnotation:
		_, err = parseTimeout(value)
	case responsesAnnotation:
		_, err = parseResponses(value)
	}
	return err
}

// cut selects the sessions of a service port that must end (A8.2).
type cut struct {
	service *portService
	all     bool // the service was deleted
	// endpoints are those that became unusable. A changed port makes another
	// endpoint (A8.5).
	endpoints map[netip.AddrPort]struct{}
	// vips are destinations that the port no longer has. They may belong to another
	// one.
	vips     map[netip.AddrPort]struct{}
	nodePort uint16 // a node port that the port no longer has; 0 if none
}

// hits reports whether a session must end.
func (c *cut) hits(r *conntrack.Record) bool {
	if c.all || c.nodePort != 0 && r.Kind == service.NodePort && r.VIP.Port() == c.nodePort {
		return true
	}
	if _, gone := c.vips[r.VIP]; gone {
		return true
	}
	_, gone := c.endpoints[r.Endpoint.Addr]
	return gone
}

// changesOf returns what a port's change ends, or nil. Readiness, topology and
// policies end no sessions (A8.3).
func changesOf(p *portService, to *service.Port) *cut {
	from := p.port
	c := &cut{service: p}
	if from.NodePort != to.NodePort {
		c.nodePort = from.NodePort
	}
	for f := range from.Families {
		c.endpoints = missing(c.endpoints, serving(&from.Families[f]), serving(&to.Families[f]))
	}
	c.vips = missing(c.vips, destinations(from), destinations(to))
	if c.nodePort == 0 && len(c.endpoints) == 0 && len(c.vips) == 0 {
		return nil
	}
	return c
}

// serving returns the endpoints that keep their sessions. An endpoint that is ready
// but not serving (publishNotReadyAddresses) keeps them too.
func serving(v *service.FamilyView) []netip.AddrPort {
	list := make([]netip.AddrPort, 0, len(v.Endpoints))
	for i := range v.Endpoints {
		if e := &v.Endpoints[i]; e.Serving || e.Ready {
			list = append(list, e.Addr)
		}
	}
	return list
}

func destinations(p *service.Port) (list []netip.AddrPort) {
	for d := range p.Destinations {
		list = append(list, netip.AddrPortFrom(d.Addr, d.Port))
	}
	return list
}

// missing adds the elements of from that to does not contain to a set.
func missing(set map[netip.AddrPort]struct{}, from, to []netip.AddrPort) map[netip.AddrPort]struct{} {
	if slices.Equal(from, to) {
		return set
	}
	still := make(map[netip.AddrPort]struct{}, len(to))
	for _, a := range to {
		still[a] = struct{}{}
	}
	for _, a := range from {
		if _, is := still[a]; is {
			continue
		}
		if set == nil {
			set = make(map[netip.AddrPort]struct{})
		}
		set[a] = struct{}{}
	}
	return set
}
