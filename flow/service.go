package flow

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/service"
)

// Annotations, without the prefix sluice.dev/.
const (
	pathAnnotation      = "datapath"
	timeoutAnnotation   = "udp-timeout"
	responsesAnnotation = "udp-responses"
)

// portService is a service port. It lives as long as the port has its name.
type portService struct {
	path     *Path
	name     service.PortName
	balancer *balancer.Balancer // read by the loop; set before the service is published, like inKernel
	places   conntrack.Places   // likewise; nil if nothing bounds its connections
	counters *conntrack.Counters
	inKernel bool
	load     uint32 // index of loads
	timeouts atomic.Pointer[timeouts]
	forNode  atomic.Bool // clients on this node itself are the kernel's, too

	// Of the configuring goroutine.
	port         *service.Port
	judged       bool            // rules of others judged what the kernel forwards when inKernel was set
	destinations []steered       // in the kernel's map
	lists        []list          // of endpoints, there
	sets         []bpf.KernelSet // of source ranges, likewise

	// Of the loop.
	first, last uint32 // indices of the newest flow and the oldest
	count       int
	at          int // in worker.crowd, while count > 0
}

// timeouts are those of a service port's UDP sessions.
type timeouts struct{ session, stream time.Duration }

// pathOf reports whether a port's annotation leaves it to the kernel, and what is wrong
// with the annotation.
func pathOf(port *service.Port) (kernel bool, problem error) {
	name, ok := port.Annotations[pathAnnotation]
	if err := CheckAnnotation(pathAnnotation, name); ok && err != nil {
		return true, fmt.Errorf("annotation sluice.dev/%s: %w; it gets auto", pathAnnotation, err)
	}
	return name != "relay", nil
}

// CheckAnnotation returns what is wrong with a Service's annotation, whose name is
// without the prefix "sluice.dev/"; nil for those that are not of this package alone.
func CheckAnnotation(name, value string) error {
	if name == pathAnnotation && !slices.Contains([]string{"auto", "kernel", "relay"}, value) {
		return fmt.Errorf("%q is not one of auto, kernel, relay", value)
	}
	return nil
}

// eligible reports whether the kernel can serve a port, because nothing about it needs the relay.
// Where rules of others judge what the kernel forwards, annotations do not count: their author may
// not be the rules' author, and could bypass the rules.
func eligible(port *service.Port, judged bool) (bool, error) {
	is, problem := pathOf(port)
	_, counts := port.Annotations[responsesAnnotation]
	if counts && port.Name.Protocol == service.UDP {
		is = false // the relay counts responses
	}
	if port.Hold > 0 || port.Rebalance > 0 || port.Limits.Any() && port.Limits.Queue > 0 {
		is = false // the relay has connections wait, and closes idle ones
	}
	if judged && !is {
		is, problem = true, errJudged
	}
	// Without the relay, an endpoint would take what a client sends for our PROXY header.
	if port.SendProxy != 0 || len(port.AcceptProxy) > 0 {
		if is = false; judged {
			problem = errProxied
		}
	}
	for f := range port.Families {
		for i := range port.Families[f].Endpoints {
			e := &port.Families[f].Endpoints[i]
			// A connection to such an address may return here: the relay bounds such loops by the
			// TTL.
			if e.MayReturn || e.Addr.Addr().IsLoopback() || e.Addr.Addr().IsLinkLocalUnicast() {
				return false, problem
			}
		}
	}
	return is, problem
}

var errJudged = errors.New("annotations that would have connections relayed (sluice.dev/datapath, udp-responses, hold, rebalance, queue-timeout) have no effect on what the kernel forwards: rules judge what the kernel forwards, and the relay would let its clients past them")

var errProxied = errors.New("PROXY headers (sluice.dev/proxy-protocol, accept-proxy-protocol) need the relay, which serves this node's own clients alone while rules judge what the kernel forwards: it refuses other clients")

// take takes a place for a new flow, or is as conntrack.Places.Take.
func (s *portService) take(l *service.Limits) (end conntrack.End, ok bool) {
	if s.places == nil {
		return conntrack.EndNone, true
	}
	return s.places.Take(l)
}

// isLimited reports whether something bounds the service port's flows, so that userspace decides about
// all of them.
func (s *portService) isLimited() bool {
	return s.port.Limits.Any() || s.places != nil && s.places.Bounded()
}

// addPlace counts a flow that has already begun against the limits.
func (f *flow) addPlace() {
	if p := f.service.places; p != nil {
		p.Add()
		f.counted = true
	}
}

// givePlace undoes addPlace, or take.
func (f *flow) givePlace() {
	if f.counted {
		f.counted = false
		f.service.places.Give()
	}
}

// sessionTimeouts returns a UDP port's timeouts. datagram says what is wrong with them.
func sessionTimeouts(port *service.Port, o *Options) *timeouts {
	t := &timeouts{session: o.UDPTimeout, stream: o.UDPStreamTimeout}
	if text, ok := port.Annotations[timeoutAnnotation]; ok {
		if d, err := time.ParseDuration(text); err == nil && d >= time.Millisecond && d <= 24*time.Hour {
			*t = timeouts{session: d, stream: d}
		}
	}
	return t
}

// add adds a flow to the service port's list.
func (s *portService) add(f *flow) {
	f.next = s.first
	if s.first != 0 {
		f.worker.flows[s.first].prev = f.index
	} else {
		s.last = f.index
	}
	s.first = f.index
	if s.count++; s.count == 1 {
		f.worker.crowd.add(s)
	}
}

func (s *portService) remove(f *flow) {
	flows := f.worker.flows
	if f.prev != 0 {
		flows[f.prev].next = f.next
	} else {
		s.first = f.next
	}
	if f.next != 0 {
		flows[f.next].prev = f.prev
	} else {
		s.last = f.prev
	}
	f.prev, f.next = 0, 0
	if s.count--; s.count == 0 {
		f.worker.crowd.remove(s)
	}
}

// moveTo moves the flow to another service port, whose balancer decides the next attempt.
func (f *flow) moveTo(s *portService) {
	f.service.remove(f)
	f.service = s
	s.add(f)
	if h := f.handshake; h != nil {
		h.plan = balancer.Dial{}
	}
}

// cut ends the UDP sessions that a change of the configuration ends (A8.2): their endpoint no
// longer serves, their destination belongs to another port, or the node no longer forwards their
// packets. Readiness, topology and policies end none (A8.3).
func (s *portService) cut(flows []*flow, st *state, port *service.Port, now int64) {
	serving := make(map[netip.AddrPort]bool)
	if port != nil {
		for f := range port.Families {
			for i := range port.Families[f].Endpoints {
				if e := &port.Families[f].Endpoints[i]; e.Serving || e.Ready {
					serving[e.Addr] = true
				}
			}
		}
	}
	for index := s.first; index != 0; {
		f := flows[index]
		index = f.next // f may go
		r := f.record
		keep := port != nil && r.Endpoint != nil && serving[r.Endpoint.Addr] && st.forwards[service.FamilyOf(r.VIP.Addr())]
		if keep {
			v := st.table.Resolve(service.UDP, r.Client.Addr(), r.VIP)
			keep = v.Port != nil && v.Port.Name == port.Name
		}
		if !keep {
			f.retire(conntrack.EndpointGone, now)
		}
	}
}
