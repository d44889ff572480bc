package stream

import (
	"context"
	"fmt"
	"net/netip"
	"strconv"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sockfilter"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// SCTP opens the sockets of a Server's SCTP ports. No kernel steers SCTP to a listening
// socket at another address: neither tproxy nor sk_lookup knows it. So each destination
// has a socket of its own, on an address that routes make local (F2):
//
//	Accept  it listens, with a filter if not every client may connect
//	Drop    it listens, with a filter that drops each INIT
//	Refuse  it is bound and does not listen, so that the kernel answers with an ABORT
//
// Its methods belong to the Server's goroutine. The Server's own Apply,
// Prune and Stop are for both protocols.
type SCTP struct {
	server *Server
	bound  map[service.Destination]*sctpSocket
	lacks  error // why the kernel has no SCTP, as of asked
	asked  int64
}

// sctpSocket is a socket that is bound to a destination.
type sctpSocket struct {
	*socket
	name service.PortName
	does policy.Action
}

// SCTP returns what opens the sockets of SCTP ports.
func (s *Server) SCTP() *SCTP { return &s.sctp }

// askPause is how long the answer holds that the kernel has no SCTP.
const askPause = time.Second

// Available returns why this kernel has no SCTP, or nil. Asking makes the kernel load
// the module, if there is one.
func (t *SCTP) Available() error {
	if now := t.server.clock(); t.asked == 0 || t.lacks != nil && now-t.asked >= int64(askPause) {
		t.asked = max(now, 1)
		t.lacks = nil
		if err := sys.TrySCTP(); err != nil {
			t.lacks = fmt.Errorf("this kernel has no SCTP (%w); loading its module sctp suffices", err)
		}
	}
	return t.lacks
}

// Balancer returns the balancer of an SCTP port, or nil.
func (t *SCTP) Balancer(name service.PortName) *balancer.Balancer { return t.server.Balancer(name) }

// Places is that of the Server.
func (t *SCTP) Places(name service.PortName) conntrack.Places { return t.server.Places(name) }

// End refuses new associations and aborts those that are open. It comes before steering
// is undone: without the routes, the kernel could not send the ABORTs. The Server's Stop
// ends what is left.
func (t *SCTP) End(ctx context.Context) error {
	for d := range t.bound {
		t.Unbind(d)
	}
	workers := t.server.workers
	select {
	case <-poll.PostAll(t.server.loops, func(i int) { workers[i].abortAll(service.SCTP) }):
		return nil
	case <-ctx.Done():
		return fmt.Errorf("aborting SCTP associations: %w", ctx.Err())
	}
}

// Bind has the socket of a destination do what the Opening says. On an error no socket
// is bound; the error wraps EADDRINUSE if another program has the port.
func (t *SCTP) Bind(at policy.Opening) error {
	b := t.bound[at.Destination]
	if b == nil {
		sock, does := t.server.inheritBound(at.Destination)
		if sock == nil {
			return t.open(at)
		}
		b = &sctpSocket{socket: sock, does: does}
		t.bound[at.Destination] = b
	}
	b.name = at.Name
	if err := t.change(b, at); err != nil {
		t.Unbind(at.Destination)
		return err
	}
	return nil
}

// open makes the socket of a destination that has none.
func (t *SCTP) open(at policy.Opening) error {
	s := t.server
	o := s.config.sctpOptions()
	o.OutStreams = s.streamsOf(at.Name)
	o.InStreams = o.OutStreams
	o.Backlog = s.config.Backlog
	if at.Limited || at.Action != policy.Accept {
		o.Filter = sockfilter.NoAssociations
	}
	fd, err := sys.ListenSCTP(netip.AddrPortFrom(at.Addr, at.Port), o)
	if err != nil {
		return err
	}
	b := &sctpSocket{&socket{fd: fd, protocol: service.SCTP}, at.Name, policy.Drop}
	b.filtered.Store(len(o.Filter) > 0)
	t.bound[at.Destination] = b
	s.join(b.socket)
	if err := t.change(b, at); err != nil {
		t.Unbind(at.Destination)
		return err
	}
	return nil
}

// change has a socket do what an Opening says.
func (t *SCTP) change(b *sctpSocket, at policy.Opening) error {
	if at.Action == policy.Refuse {
		if b.does != policy.Refuse {
			t.refuse(b)
		}
		b.does = at.Action
		return nil
	}
	t.admit(b, &at)
	if b.does == policy.Refuse {
		if e := sys.ListenAgain(b.fd, t.server.config.Backlog); e != 0 {
			return fmt.Errorf("listen %s: %w", netip.AddrPortFrom(at.Addr, at.Port), e)
		}
	}
	b.does = at.Action
	return nil
}

// admit has a socket answer the clients that the Opening allows, and drop the INITs of
// all others (A3.5, A3.6, A3.10, F5).
func (t *SCTP) admit(b *sctpSocket, at *policy.Opening) {
	s, unfiltered := t.server, 0
	switch {
	case at.Action == policy.Drop:
		if e := b.filter(sockfilter.NoAssociations); e != 0 {
			unfiltered = 1
		}
	case at.Limited:
		program, err := sockfilter.CompileClients(at.Addr, at.Allowed)
		if err == nil {
			if e := b.filter(program); e != 0 {
				err = e
			}
		}
		if err != nil {
			s.warnTooManyRanges(at, err)
			unfiltered = 1
			b.unfilter()
		}
	default:
		b.unfilter()
	}
	s.setUnfiltered(b.socket, unfiltered)
}

// refuse has a socket refuse, once what waits in its queue is accepted.
func (t *SCTP) refuse(b *sctpSocket) {
	s := t.server
	for n := range s.config.Backlog {
		fd, client, e := sys.Accept(b.fd)
		if e != 0 {
			break
		}
		vip, e := sys.LocalAddr(fd)
		if e != 0 {
			sys.Close(fd)
			continue
		}
		w := s.workers[n%len(s.workers)]
		s.open.Add(1)
		w.post(func() {
			if c := w.admit(fd, service.SCTP, unmap(client), unmap(vip)); c != nil {
				c.fail(conntrack.LimitReached)
			}
		})
	}
	sys.RefuseSCTP(b.fd)
}

// Unbind closes the socket of a destination. Established associations go on (A8.7).
func (t *SCTP) Unbind(d service.Destination) {
	b := t.bound[d]
	if b == nil {
		return
	}
	delete(t.bound, d)
	t.refuse(b)
	t.server.discard(b.socket)
}

// streamsAnnotation bounds the streams of a Service's associations each way, without the
// prefix sluice.dev/.
const streamsAnnotation = "sctp-streams"

// MostStreams bounds the streams of an association each way: 65,535 take 2.9 MB.
const MostStreams = 1024

func parseStreams(text string) (uint16, error) {
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n < 1 || n > MostStreams {
		return 0, fmt.Errorf("%q is not a number from 1 to %d", text, MostStreams)
	}
	return uint16(n), nil
}

// CheckAnnotation returns what is wrong with the value of an annotation of a Service,
// without the prefix sluice.dev/; nil for names that are not known here.
func CheckAnnotation(name, value string) (err error) {
	if name == streamsAnnotation {
		_, err = parseStreams(value)
	}
	return err
}

// configure takes the streams of a changed port over.
func (t *SCTP) configure(p *pool) {
	s := t.server
	p.streams = uint16(s.config.Streams)
	if text := p.port.Annotations[streamsAnnotation]; text != "" {
		if n, err := parseStreams(text); err != nil {
			s.warn(p.port, fmt.Errorf("annotation sluice.dev/%s: %w; it gets %d", streamsAnnotation, err, p.streams))
		} else {
			p.streams = n
		}
	}
	for _, b := range t.bound {
		if b.name == p.port.Name {
			sys.SetStreams(b.fd, p.streams, p.streams)
		}
	}
}

// streamsOf returns the bound of a service port's streams.
func (s *Server) streamsOf(name service.PortName) uint16 {
	if p := s.pools[name]; p != nil && p.streams > 0 {
		return p.streams
	}
	return uint16(s.config.Streams)
}

// Times of SCTP sockets.
const (
	// sackDelay is how long an acknowledgement waits for a message to go with. A
	// peer's shutdown waits for it, too.
	sackDelay = 20 * time.Millisecond
	// sctpTimeout bounds the time between two retransmissions.
	sctpTimeout = 8 * time.Second
	// sctpUnanswered is how many in a row end an association: with the doubling times
	// from a second up to sctpTimeout, 31 s.
	sctpUnanswered = 5
	// sctpPathUnanswered is how many lead to another address of a client.
	sctpPathUnanswered = 2
	// heartbeats is how many probes there are in KeepAlive. So a dead peer is found
	// after about twice KeepAlive, as with TCP, at the default.
	heartbeats = 6
)

// sctpOptions returns the options that all SCTP sockets have in common.
func (cfg *Config) sctpOptions() sys.SCTPOptions {
	o := sys.SCTPOptions{
		SendBuffer:    max(cfg.MaxMessage, leastBuffer),
		ReceiveBuffer: max(3*cfg.MaxMessage, leastBuffer), // less makes large messages wait
		SACKDelay:     sackDelay,
	}
	if cfg.KeepAlive > 0 {
		o.Liveness = sys.SCTPLiveness{
			Heartbeat: cfg.KeepAlive / heartbeats, Unanswered: sctpUnanswered,
			PathUnanswered: sctpPathUnanswered, MaxTimeout: sctpTimeout,
		}
	}
	return o
}

// leastBuffer is the kernel's default.
const leastBuffer = 208 << 10
