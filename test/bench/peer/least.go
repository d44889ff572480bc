package peer

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/world"
)

// LeastRelayRole is the argument that makes this program the least SCTP relay.
const LeastRelayRole = "@leastrelay"

// LeastRelaySpec describes the least SCTP relay.
type LeastRelaySpec struct {
	Listen   netip.Addr
	Ports    []uint16
	Endpoint netip.Addr
}

// RunLeastRelay is the least that an SCTP relay can do: it receives messages from one
// socket and sends them to the other. It has one endpoint and a thread for each
// association, keeps no records, bounds nothing, and ends an association by an ABORT. So
// it tells what a relay can reach. It runs until the process is killed.
func RunLeastRelay(spec LeastRelaySpec) error {
	// As the product's by default.
	const buffer = 208 << 10
	o := sys.SCTPOptions{OutStreams: 64, InStreams: 64, SendBuffer: buffer, ReceiveBuffer: buffer, SACKDelay: 20 * time.Millisecond}
	failed := make(chan error)
	for _, port := range spec.Ports {
		l, err := sys.ListenSCTP(netip.AddrPortFrom(spec.Listen, port), o)
		if err != nil {
			return fmt.Errorf("least relay: %w", err)
		}
		go func() { failed <- acceptAssociations(l, netip.AddrPortFrom(spec.Endpoint, port), o) }()
	}
	return <-failed
}

// forever is the time that poll waits.
const forever = -1

func acceptAssociations(listener int, endpoint netip.AddrPort, o sys.SCTPOptions) error {
	for {
		if _, err := unix.Poll([]unix.PollFd{{Fd: int32(listener), Events: unix.POLLIN}}, forever); err != nil && err != unix.EINTR {
			return fmt.Errorf("least relay: %w", err)
		}
		client, _, e := sys.Accept(listener)
		if e != 0 {
			continue
		}
		go func() {
			defer sys.Close(client)
			local, _ := sys.SourceOf(endpoint)
			server, e := sys.ConnectSCTP(endpoint, local, o)
			if e != 0 && e != sys.EINPROGRESS {
				return
			}
			defer sys.Close(server)
			if connected(server) {
				newAssociation(client, server).run()
			}
		}()
	}
}

// connected waits until a socket is connected; false if it failed.
func connected(fd int) bool {
	for {
		if _, e := sys.SCTPConnected(fd); e != sys.EAGAIN {
			return e == 0
		}
		_, _ = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}, 1000)
	}
}

// association is a relayed one: two sockets, and for each the message that was read from
// it and waits for room.
type association struct {
	fds     [2]int
	box     sys.SCTPMailbox
	buffers [2][]byte
	infos   [2]sys.MessageInfo
	parts   [2]int // bytes of a message that is not complete
	waits   [2]int // bytes of the waiting message; 0: none
}

func newAssociation(client, server int) *association {
	const largest = 64 << 10
	return &association{fds: [2]int{client, server}, buffers: [2][]byte{make([]byte, largest), make([]byte, largest)}}
}

// run relays until a side ends.
func (a *association) run() {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for {
		var sides [2]unix.PollFd
		for i, fd := range a.fds {
			sides[i].Fd = int32(fd)
			if a.waits[i] == 0 {
				sides[i].Events |= unix.POLLIN
			}
			if a.waits[1-i] > 0 {
				sides[i].Events |= unix.POLLOUT
			}
		}
		if _, err := unix.Poll(sides[:], forever); err != nil {
			continue
		}
		for i := range sides {
			if sides[i].Revents&(unix.POLLERR|unix.POLLHUP) != 0 {
				return
			}
			if sides[i].Revents&unix.POLLOUT != 0 && !a.send(1-i) || sides[i].Revents&unix.POLLIN != 0 && !a.pass(i) {
				return
			}
		}
	}
}

// pass passes on some of the messages that are there; false if the association ends.
func (a *association) pass(i int) bool {
	const some = 32
	for range some {
		n, kind, info, e := a.box.Receive(a.fds[i], a.buffers[i][a.parts[i]:])
		switch {
		case e == sys.EAGAIN:
			return true
		case e != 0 || kind == sys.SCTPMessage && n == 0:
			return false
		case kind == sys.SCTPPart:
			a.parts[i] += n
			continue
		case kind != sys.SCTPMessage:
			continue
		}
		if a.waits[i], a.infos[i] = a.parts[i]+n, info; !a.send(i) {
			return false
		}
		a.parts[i] = 0
		if a.waits[i] > 0 {
			return true
		}
	}
	return true
}

// send sends the message that was read from a side; false if the association ends.
func (a *association) send(i int) bool {
	switch a.box.Send(a.fds[1-i], a.buffers[i][:a.waits[i]], a.infos[i]) {
	case 0:
		a.waits[i] = 0
	case sys.EAGAIN:
	default:
		return false
	}
	return true
}

func startLeastRelay(s *Site) (*Running, error) {
	if err := s.World.AnyIP(); err != nil {
		return nil, err
	}
	spec, err := json.Marshal(LeastRelaySpec{Listen: s.World.VIP, Ports: load.SCTPPorts, Endpoint: s.World.Endpoints[0]})
	if err != nil {
		return nil, err
	}
	return s.launch(world.Command{Path: s.Self, Args: []string{LeastRelayRole}, Env: []string{"GODEBUG=asyncpreemptoff=1"}, Stdin: spec})
}
