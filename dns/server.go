package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/net/dns/dnsmessage"

	"github.com/sluice-proxy/sluice/service"
)

// Options are the choices of a Server.
type Options struct {
	// Addresses are where it answers, over UDP and TCP. A Server does not answer on all of
	// a host's addresses (0.0.0.0, ::), as an answer over UDP may then leave with another
	// address than the question had.
	Addresses []netip.AddrPort
	// Zone is the cluster's, such as "cluster.local".
	Zone string
	// Forward are the resolvers that other questions are sent to, one after the other.
	// Without any, the Server refuses them.
	Forward []netip.AddrPort
}

const (
	// mostConns bounds open TCP connections, mostClientConns those of one client, and
	// connIdle the time between two questions.
	mostConns       = 256
	mostClientConns = 32
	connIdle        = 10 * time.Second
)

// Stats counts since the start.
type Stats struct {
	Answered  uint64 `metric:"sluice_dns_answered_total" help:"Questions for names of Services that exist."`
	Missing   uint64 `metric:"sluice_dns_missing_total" help:"Questions for names in the zone that do not exist."`
	Forwarded uint64 `metric:"sluice_dns_forwarded_total" help:"Questions that other resolvers were asked."`
	Refused   uint64 `metric:"sluice_dns_refused_total" help:"Questions for other names without --dns-forward, and of kinds that are not answered."`
	Failed    uint64 `metric:"sluice_dns_failed_total" help:"Questions that no resolver answered, or that were not understood."`
}

// Server answers questions. Its methods may be called from any goroutine.
type Server struct {
	options Options
	zone    string
	self    []netip.Addr
	udp     []*net.UDPConn
	tcp     []*net.TCPListener
	now     atomic.Pointer[view]
	turn    atomic.Uint32
	forward *forwarder // nil without resolvers

	mu      sync.Mutex
	open    int                // TCP connections; guarded by mu
	clients map[netip.Addr]int // the same for each client; guarded by mu

	answered, missing, forwarded, refused, failed atomic.Uint64
}

// ZoneFault says what is wrong with the name of a zone, or returns "".
func ZoneFault(zone string) string {
	if !validName(strings.TrimSuffix(zone, ".")+".") || zone == "" || zone == "." || len(zone) > 100 {
		return "is not a domain such as cluster.local"
	}
	return ""
}

// Listen opens the sockets of a Server. It answers nothing until Set is called.
func Listen(o Options) (*Server, error) {
	if fault := ZoneFault(o.Zone); fault != "" {
		return nil, fmt.Errorf("zone %q %s", o.Zone, fault)
	}
	s := &Server{options: o, zone: strings.ToLower(strings.TrimSuffix(o.Zone, ".")) + ".", clients: make(map[netip.Addr]int)}
	if len(o.Forward) > 0 {
		s.forward = newForwarder(o.Forward)
	}
	for _, at := range o.Addresses {
		udp, tcp, err := listenBoth(at)
		if err != nil {
			s.Close()
			return nil, err
		}
		s.udp, s.tcp = append(s.udp, udp), append(s.tcp, tcp)
		s.self = append(s.self, at.Addr())
	}
	return s, nil
}

// listenBoth listens over UDP and TCP at one port. With port 0, it looks for one that both
// can have.
func listenBoth(at netip.AddrPort) (*net.UDPConn, *net.TCPListener, error) {
	for try := 1; ; try++ {
		udp, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(at))
		if err != nil {
			return nil, nil, err
		}
		port := udp.LocalAddr().(*net.UDPAddr).AddrPort().Port()
		tcp, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(at.Addr(), port)))
		if err == nil {
			return udp, tcp, nil
		}
		_ = udp.Close()
		if at.Port() != 0 || try == 20 {
			return nil, nil, err
		}
	}
}

// Set makes the answers those of names, for clients on nodes; of others the place is own.
func (s *Server) Set(names *Names, nodes *service.Nodes, own service.Node) {
	next := &view{names: names, zone: s.zone, self: s.self}
	if last := s.now.Load(); last != nil && last.places.nodes == nodes && last.places.own.Node == own.Name {
		next.places = last.places
	} else {
		next.places = newPlaces(nodes, own)
	}
	s.now.Store(next)
}

// Stats returns the counters.
func (s *Server) Stats() Stats {
	return Stats{s.answered.Load(), s.missing.Load(), s.forwarded.Load(), s.refused.Load(), s.failed.Load()}
}

// Serve answers until ctx ends.
func (s *Server) Serve(ctx context.Context) {
	var running sync.WaitGroup
	stop := context.AfterFunc(ctx, s.Close)
	defer stop()
	for _, c := range s.udp {
		running.Go(func() { s.serveUDP(ctx, c) })
	}
	for _, l := range s.tcp {
		running.Go(func() { s.serveTCP(ctx, l) })
	}
	running.Wait()
}

// Close closes the listening sockets.
func (s *Server) Close() {
	for _, c := range s.udp {
		_ = c.Close()
	}
	for _, l := range s.tcp {
		_ = l.Close()
	}
}

// errorPause is the pause after an error of a socket that stays open.
const errorPause = 5 * time.Millisecond

func (s *Server) serveUDP(ctx context.Context, c *net.UDPConn) {
	buffer := make([]byte, 4096)
	for {
		n, client, err := c.ReadFromUDPAddrPort(buffer)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(errorPause)
			continue
		}
		send := func(reply []byte) { _, _ = c.WriteToUDPAddrPort(reply, client) }
		reply, later := s.handle(buffer[:n], client.Addr().Unmap(), "udp")
		if later != nil {
			if !s.forward.run(ctx, later, send) {
				s.failed.Add(1)
			}
		} else if reply != nil {
			send(reply)
		}
	}
}

func (s *Server) serveTCP(ctx context.Context, l *net.TCPListener) {
	for {
		c, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			time.Sleep(errorPause)
			continue
		}
		client := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap()
		if !s.admit(client) {
			_ = c.Close()
			continue
		}
		go func() {
			defer s.release(client)
			s.serveConn(ctx, c, client)
		}()
	}
}

// admit counts a TCP connection of a client, unless there are too many.
func (s *Server) admit(client netip.Addr) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open == mostConns || s.clients[client] == mostClientConns {
		return false
	}
	s.open++
	s.clients[client]++
	return true
}

// release undoes admit.
func (s *Server) release(client netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open--
	if s.clients[client]--; s.clients[client] == 0 {
		delete(s.clients, client)
	}
}

// serveConn answers the questions of a TCP connection in their order.
func (s *Server) serveConn(ctx context.Context, c *net.TCPConn, client netip.Addr) {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	defer c.Close()
	for {
		_ = c.SetDeadline(time.Now().Add(connIdle))
		message, err := readMessage(c)
		if err != nil {
			return
		}
		reply, later := s.handle(message, client, "tcp")
		if later != nil {
			reply = later(ctx)
		}
		if reply == nil || writeMessage(c, reply) != nil {
			return
		}
	}
}

// readMessage reads a message with its length before it (RFC 1035, 4.2.2).
func readMessage(c io.Reader) ([]byte, error) {
	var length [2]byte
	if _, err := io.ReadFull(c, length[:]); err != nil {
		return nil, err
	}
	message := make([]byte, binary.BigEndian.Uint16(length[:]))
	_, err := io.ReadFull(c, message)
	return message, err
}

func writeMessage(c io.Writer, message []byte) error {
	_, err := c.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(message))), message...))
	return err
}

// handle returns the reply to a message; nil for none. later is set if a resolver has to
// be asked first, which then gives the reply; the message may change meanwhile.
func (s *Server) handle(message []byte, client netip.Addr, network string) (reply []byte, later func(context.Context) []byte) {
	q, code, ok := parse(message)
	if !ok {
		return nil, nil
	}
	size := q.size
	if network == "tcp" {
		size = tcpSize
	}
	v := s.now.Load()
	switch {
	case code != dnsmessage.RCodeSuccess:
	case q.edns && q.version != 0:
		code = rcodeBadVers
	case v == nil:
		code = dnsmessage.RCodeServerFailure
	case q.question.Type == dnsmessage.TypeAXFR || q.question.Type == typeIXFR,
		q.question.Class != dnsmessage.ClassINET && q.question.Class != dnsmessage.ClassANY:
		code = dnsmessage.RCodeRefused
	}
	if code != dnsmessage.RCodeSuccess {
		return s.fail(&q, code, size), nil
	}
	turned := *v
	turned.turn = s.turn.Add(1) * 0x9e3779b9 // far apart also for every second question
	a := turned.answer(q.question, client)
	switch {
	case !a.ours && s.forward == nil:
		return s.fail(&q, dnsmessage.RCodeRefused, size), nil
	case !a.ours:
		message := append([]byte(nil), message...)
		return nil, func(ctx context.Context) []byte {
			s.forwarded.Add(1)
			if reply := s.forward.ask(ctx, message, network); reply != nil {
				return reply
			}
			return s.fail(&q, dnsmessage.RCodeServerFailure, size)
		}
	case a.alias != "" && s.forward != nil:
		return nil, func(ctx context.Context) []byte {
			s.forwarded.Add(1)
			if !s.forward.complete(ctx, &a, q.question.Type) {
				return s.fail(&q, dnsmessage.RCodeServerFailure, size)
			}
			return s.pack(&q, &a, size)
		}
	}
	return s.pack(&q, &a, size), nil
}

// pack counts and packs an answer about a name of ours.
func (s *Server) pack(q *query, a *answer, size int) []byte {
	counter := &s.answered
	if a.code == dnsmessage.RCodeNameError {
		counter = &s.missing
	}
	counter.Add(1)
	reply, err := q.reply(a, s.now.Load().soa, s.forward != nil, size)
	if err != nil {
		return s.fail(q, dnsmessage.RCodeServerFailure, size)
	}
	return reply
}

// fail counts and packs an answer that has only a code.
func (s *Server) fail(q *query, code dnsmessage.RCode, size int) []byte {
	if code == dnsmessage.RCodeRefused {
		s.refused.Add(1)
	} else {
		s.failed.Add(1)
	}
	reply, err := q.reply(&answer{code: code}, nil, s.forward != nil, size)
	if err != nil {
		return nil
	}
	return reply
}
