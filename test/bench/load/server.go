package load

import (
	"bytes"
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"
)

// The server's ports. A service has the same ports.
const (
	PortEcho    = 7001 // returns what it receives, until the client closes
	PortOnce    = 7002 // returns the first message and closes
	PortSource  = 7003 // sends without end
	PortSink    = 7004 // reads without end
	PortHTTP    = 7005 // answers every HTTP request with MessageSize bytes
	PortPattern = 7006 // see pattern.go
	PortAside   = 7007 // as PortEcho, on a separate thread
	PortIperf   = 5201 // iperf3's own
)

// Ports lists them all.
var Ports = []uint16{PortEcho, PortOnce, PortSource, PortSink, PortHTTP, PortPattern, PortAside, PortIperf}

// SCTPPorts lists those that also serve SCTP.
var SCTPPorts = []uint16{PortEcho, PortSource}

// MessageSize is the size of a request and of its response, in bytes.
const MessageSize = 128

// The sizes of SCTP messages, in bytes: of a request and of its response, and of those
// that PortSource sends.
const (
	SCTPMessageSize = 100
	SCTPBulkSize    = 16 << 10
)

// bulkSize is the size of a bulk stream's reads and writes; iperf3 uses the same.
const bulkSize = 128 << 10

// ServerSpec says how to serve.
type ServerSpec struct {
	Address netip.Addr // of the listening sockets; unspecified for all of the family
	Threads int        // for each of bulk and small messages
	SCTP    bool       // PortEcho and PortSource serve SCTP too
}

// Serve answers on all ports until the process is killed. It uses the whole
// process: the garbage collector is off, and each loop has a thread.
func Serve(spec ServerSpec) error {
	debug.SetGCPercent(-1)
	runtime.GOMAXPROCS(2*spec.Threads + 5 + len(UDPPorts))
	groups := [][]uint16{{PortAside}}
	for range spec.Threads {
		groups = append(groups, []uint16{PortEcho, PortOnce, PortHTTP}, []uint16{PortSource, PortSink})
	}
	for _, ports := range groups {
		s, err := newServer(spec.Address, ports, unix.IPPROTO_TCP, bulkSize)
		if err != nil {
			return err
		}
		go s.run()
	}
	if spec.SCTP {
		s, err := newServer(spec.Address, SCTPPorts, unix.IPPROTO_SCTP, SCTPBulkSize)
		if err != nil {
			return err
		}
		go s.run()
	}
	for _, port := range UDPPorts {
		if err := serveUDP(netip.AddrPortFrom(spec.Address, port)); err != nil {
			return err
		}
	}
	return servePattern(netip.AddrPortFrom(spec.Address, PortPattern))
}

// server is one loop with the connections that it accepted.
type server struct {
	poll  *poller
	conns []served // by descriptor
	buf   []byte
	bulk  []byte
}

// served is a connection's or a listener's state.
type served struct {
	port      uint16
	listener  bool
	lineEnds  uint8  // HTTP: how much of the blank line has arrived
	lastOne   bool   // HTTP: close after this response
	unwritten []byte // what the socket did not accept; nil almost always
}

var httpResponse = fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\nContent-Type: text/plain\r\n\r\n%s",
	MessageSize, bytes.Repeat([]byte("."), MessageSize))

func newServer(at netip.Addr, ports []uint16, protocol, bulk int) (*server, error) {
	p, err := newPoller()
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	s := &server{poll: p, buf: make([]byte, 2*bulkSize), bulk: bytes.Repeat([]byte("sluice__"), bulk/8)}
	for _, port := range ports {
		addr := newSockaddr(netip.AddrPortFrom(at, port))
		addr.protocol = protocol
		fd, errno := listen(addr)
		if errno != 0 {
			return nil, fmt.Errorf("listen at port %d: %w", port, errno)
		}
		s.at(fd).port, s.at(fd).listener = port, true
		if errno := p.add(fd, unix.EPOLLIN, int32(fd)); errno != 0 {
			return nil, fmt.Errorf("epoll: %w", errno)
		}
	}
	return s, nil
}

func (s *server) at(fd int) *served {
	for fd >= len(s.conns) {
		s.conns = append(s.conns, make([]served, 1024)...)
	}
	return &s.conns[fd]
}

func (s *server) run() {
	runtime.LockOSThread()
	for {
		for _, ev := range s.poll.wait(1000) {
			fd := int(ev.Fd)
			c := &s.conns[fd]
			switch {
			case c.listener:
				s.accept(fd, c.port)
			case ev.Events&(unix.EPOLLERR|unix.EPOLLHUP) != 0:
				s.close(fd)
			default:
				s.serve(fd, c, ev.Events)
			}
		}
	}
}

// accept takes a few of the waiting connections, so that open ones do not wait.
func (s *server) accept(listener int, port uint16) {
	events := uint32(unix.EPOLLIN)
	if port == PortSource {
		events = unix.EPOLLOUT | unix.EPOLLRDHUP
	}
	for range 16 {
		fd, errno := accept(listener)
		if errno != 0 {
			return
		}
		*s.at(fd) = served{port: port}
		if errno := s.poll.add(fd, events, int32(fd)); errno != 0 {
			closeFD(fd)
		}
	}
}

func (s *server) close(fd int) {
	s.conns[fd] = served{}
	closeFD(fd)
}

func (s *server) serve(fd int, c *served, events uint32) {
	if c.port == PortSource {
		if events&unix.EPOLLRDHUP != 0 {
			s.close(fd)
			return
		}
		if _, errno := write(fd, s.bulk); errno != 0 && errno != unix.EAGAIN {
			s.close(fd)
		}
		return
	}
	if len(c.unwritten) > 0 {
		s.send(fd, c, c.unwritten)
		return
	}
	n, errno := read(fd, s.buf)
	if errno == unix.EAGAIN {
		return
	}
	if errno != 0 || n == 0 {
		s.close(fd)
		return
	}
	switch c.port {
	case PortEcho, PortAside:
		s.send(fd, c, s.buf[:n])
	case PortOnce:
		_, _ = write(fd, s.buf[:n])
		s.close(fd)
	case PortHTTP:
		s.answerHTTP(fd, c, s.buf[:n])
	}
}

// send writes, and keeps what the socket does not accept.
func (s *server) send(fd int, c *served, data []byte) {
	n, errno := write(fd, data)
	if errno != 0 && errno != unix.EAGAIN {
		s.close(fd)
		return
	}
	if errno == unix.EAGAIN {
		n = 0
	}
	waited := len(c.unwritten) > 0
	if n == len(data) {
		c.unwritten = nil
		if waited {
			s.poll.modify(fd, unix.EPOLLIN, int32(fd))
		}
		return
	}
	c.unwritten = bytes.Clone(data[n:])
	if !waited {
		s.poll.modify(fd, unix.EPOLLOUT, int32(fd))
	}
}

// answerHTTP answers each blank line. It implements as much HTTP as wrk needs.
func (s *server) answerHTTP(fd int, c *served, data []byte) {
	c.lastOne = c.lastOne || bytes.Contains(data, []byte("Connection: close"))
	for _, b := range data {
		if b != "\r\n\r\n"[c.lineEnds] {
			c.lineEnds = 0
			if b == '\r' {
				c.lineEnds = 1
			}
			continue
		}
		if c.lineEnds++; c.lineEnds < 4 {
			continue
		}
		c.lineEnds = 0
		_, errno := write(fd, httpResponse)
		if errno != 0 || c.lastOne {
			s.close(fd)
			return
		}
	}
}
