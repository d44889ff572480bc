package load

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"runtime"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// The server's UDP ports.
const (
	PortUDPEcho  = 7101 // returns what it receives
	PortUDPSink  = 7102 // counts datagrams; a datagram of 8 bytes asks for their number, and the answer repeats it
	PortUDPFlood = 7103 // as PortUDPEcho, on a separate thread: the service that a flood hits
)

// UDPPorts lists them.
var UDPPorts = []uint16{PortUDPEcho, PortUDPSink, PortUDPFlood}

// udpPatience is how long a request waits for its response before it counts as
// lost.
const udpPatience = 1e9 // ns

// serveUDP answers on a UDP port, on a separate thread.
func serveUDP(at netip.AddrPort) error {
	fd, err := sys.BindUDP(at, sys.UDPOptions{ReusePort: true, ReceiveBuffer: 8 << 20})
	if err != nil {
		return err
	}
	p, err := newPoller()
	if err != nil {
		return err
	}
	if errno := p.add(fd, unix.EPOLLIN, 0); errno != 0 {
		return fmt.Errorf("epoll: %w", errno)
	}
	go func() {
		runtime.LockOSThread()
		in, out := sys.NewInbox(64), sys.NewOutbox(64)
		counts := make(map[netip.AddrPort]uint64)
		answers := make([][16]byte, 64)
		for {
			p.wait(1000)
			n, errno := in.Receive(fd, 0, in.Slots())
			if errno != 0 {
				continue
			}
			for i := range n {
				from, data := in.From(i), in.Data(i)
				switch {
				case at.Port() != PortUDPSink:
					out.Append(from, data, 0, false)
				case len(data) == 8:
					copy(answers[i][:8], data)
					binary.BigEndian.PutUint64(answers[i][8:], counts[from])
					out.Append(from, answers[i][:], 0, false)
				default:
					counts[from]++
				}
			}
			for !out.Empty() && out.Send(fd) != 0 {
				out.Skip()
			}
		}
	}()
	return nil
}

// dialUDP returns a connected socket.
func dialUDP(target netip.AddrPort) (int, sys.Errno) {
	fd, errno := sys.UDPSocket(target.Addr().Is6())
	if errno != 0 {
		return -1, errno
	}
	if errno := sys.ConnectUDP(fd, target, netip.AddrPort{}); errno != 0 {
		sys.Close(fd)
		return -1, errno
	}
	return fd, 0
}

// asker sends requests over UDP. Each client sends its next one when the response
// has arrived or the request is lost. fresh uses a new socket for each request.
type asker struct {
	m       meter
	poll    *poller
	targets []netip.AddrPort
	clients []question
	fresh   bool
	turn    int
	swept   int64
	buf     [2 * MessageSize]byte
}

// question is a request that waits for its response.
type question struct {
	fd     int
	number uint64
	sent   int64
}

func newAsker(spec Spec, clients int, fresh bool) (*asker, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	a := &asker{poll: p, clients: make([]question, clients), fresh: fresh}
	for _, t := range spec.Targets {
		a.targets = append(a.targets, netip.AddrPortFrom(t, PortUDPEcho))
	}
	for i := range a.clients {
		a.clients[i] = question{fd: -1, number: uint64(i) << 40}
		if err := a.dial(i); err != nil {
			return nil, err
		}
	}
	return a, nil
}

func (a *asker) meter() *meter { return &a.m }

func (a *asker) dial(i int) error {
	c := &a.clients[i]
	if c.fd >= 0 {
		closeFD(c.fd)
	}
	a.turn++
	fd, errno := dialUDP(a.targets[a.turn%len(a.targets)])
	if errno != 0 {
		c.fd = -1
		return errno
	}
	c.fd = fd
	if errno := a.poll.add(fd, unix.EPOLLIN, int32(i)); errno != 0 {
		return fmt.Errorf("epoll: %w", errno)
	}
	return nil
}

func (a *asker) run(w window) {
	a.m.open(w)
	for i := range a.clients {
		a.ask(i, now())
	}
	for t := now(); a.m.tick(t); t = now() {
		if t-a.swept > udpPatience/10 {
			a.swept = t
			for i := range a.clients {
				if t-a.clients[i].sent > udpPatience {
					a.m.failed("no response")
					a.next(i, t)
				}
			}
		}
		for _, ev := range a.poll.wait(20) {
			a.receive(int(ev.Fd))
		}
	}
}

func (a *asker) next(i int, t int64) {
	if a.fresh {
		if err := a.dial(i); err != nil {
			a.m.failed(err.Error())
			a.clients[i].sent = t
			return
		}
	}
	a.ask(i, t)
}

func (a *asker) ask(i int, t int64) {
	c := &a.clients[i]
	c.number++
	c.sent = t
	binary.NativeEndian.PutUint64(a.buf[:], c.number)
	if _, errno := write(c.fd, a.buf[:MessageSize]); errno != 0 {
		a.m.failed(errno.Error())
	}
}

func (a *asker) receive(i int) {
	c := &a.clients[i]
	if c.fd < 0 {
		return
	}
	n, errno := read(c.fd, a.buf[:])
	switch {
	case errno == unix.EAGAIN:
	case errno != 0:
		a.m.failed(errno.Error())
		a.next(i, now())
	case n == MessageSize && binary.NativeEndian.Uint64(a.buf[:]) == c.number:
		t := now()
		a.m.done(t, c.sent)
		a.next(i, t)
	}
}

// pourer sends datagrams as fast as it can, and finally asks the server how many
// arrived.
type pourer struct {
	m     meter
	fd    int
	data  []byte
	gso   bool
	asked uint64
}

func newPourer(spec Spec) (*pourer, error) {
	fd, errno := dialUDP(netip.AddrPortFrom(spec.Targets[0], PortUDPSink))
	if errno != 0 {
		return nil, errno
	}
	return &pourer{fd: fd, data: make([]byte, spec.Size), gso: spec.GSO}, nil
}

func (p *pourer) meter() *meter { return &p.m }

func (p *pourer) run(w window) {
	p.m.open(w)
	out := sys.NewOutbox(32)
	begun := uint64(0)
	for t := now(); ; t = now() {
		counting := p.m.start == 0
		if !p.m.tick(t) {
			break
		}
		if counting && p.m.start != 0 {
			var err error
			if begun, err = p.arrived(); err != nil {
				p.m.failed(err.Error())
			}
		}
		for range 32 {
			out.Append(netip.AddrPort{}, p.data, 0, p.gso)
		}
		p.m.sent += 32
		for !out.Empty() {
			if errno := out.Send(p.fd); errno != 0 {
				p.m.sent -= uint64(out.Skip())
			}
		}
	}
	ended, err := p.arrived()
	if err != nil {
		p.m.failed(err.Error())
		return
	}
	p.m.count = ended - begun
	p.m.bytes = p.m.count * uint64(len(p.data))
}

// arrived asks the server how many datagrams have arrived. An answer to an earlier
// question may arrive late.
func (p *pourer) arrived() (uint64, error) {
	const patience = 10e9 // ns
	question, answer := make([]byte, 8), make([]byte, 16)
	p.asked++
	binary.BigEndian.PutUint64(question, p.asked)
	for begin := now(); now()-begin < patience; {
		if _, errno := write(p.fd, question); errno != 0 && errno != unix.ECONNREFUSED {
			continue
		}
		ready := []unix.PollFd{{Fd: int32(p.fd), Events: unix.POLLIN}}
		if n, err := unix.Poll(ready, 200); err != nil || n == 0 {
			continue
		}
		for {
			n, errno := read(p.fd, answer)
			if errno == unix.EAGAIN {
				break
			}
			if n == 16 && binary.BigEndian.Uint64(answer) == p.asked {
				return binary.BigEndian.Uint64(answer[8:]), nil
			}
		}
	}
	return 0, errors.New("the server does not say how many datagrams came")
}
