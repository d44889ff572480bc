package sctp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// programEnv is the binary under test; set in the guest only.
const programEnv = "SLUICE_SCTP_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(programEnv) == "" {
		return // this kernel need not have SCTP: test/vm runs these tests in one that has
	}
	os.Exit(netns.Main(m))
}

// patience is how long tests wait: a guest shares its CPU with all that the host does. Five
// megabytes that wait in a relay took more than a minute.
const patience = 5 * time.Minute

// peer is one side of an association, used by one goroutine.
type peer struct {
	fd     int
	box    sys.SCTPMailbox
	buffer []byte
	rest   []byte // parts of a message that is not complete
	shut   bool   // this side has shut down

	patience time.Duration // how long it waits for a message, and for room to send one
}

// note is a message with its information.
type note struct {
	sys.MessageInfo
	text []byte
}

const largest = 1 << 20

func newPeer(fd int) *peer { return &peer{fd: fd, buffer: make([]byte, largest), patience: patience} }

// options are those of test peers: many streams and large buffers.
func options() sys.SCTPOptions {
	return sys.SCTPOptions{OutStreams: 64, InStreams: 64, SendBuffer: largest, ReceiveBuffer: 2 * largest}
}

// dial connects to an address, and waits.
func dial(from *netns.Namespace, to string, o sys.SCTPOptions) (*peer, error) {
	return dialFrom(from, to, netip.Addr{}, o)
}

func dialFrom(from *netns.Namespace, to string, local netip.Addr, o sys.SCTPOptions) (p *peer, err error) {
	do := func() error {
		fd, e := sys.ConnectSCTP(netip.MustParseAddrPort(to), local, o)
		if e != 0 && e != sys.EINPROGRESS {
			return e
		}
		p = newPeer(fd)
		return nil
	}
	if from == nil {
		err = do()
	} else {
		err = from.Do(do)
	}
	if err != nil {
		return nil, err
	}
	for until := time.Now().Add(patience); ; {
		switch _, e := sys.SCTPConnected(p.fd); {
		case e == 0:
			return p, nil
		case e != sys.EAGAIN || time.Now().After(until):
			sys.Close(p.fd)
			return nil, e
		}
		p.poll(unix.POLLOUT, time.Second)
	}
}

// poll waits for events for a time.
func (p *peer) poll(events int16, d time.Duration) bool {
	fds := []unix.PollFd{{Fd: int32(p.fd), Events: events}}
	n, _ := unix.Poll(fds, int(d/time.Millisecond))
	return n > 0
}

func (p *peer) send(n note) error {
	for until := time.Now().Add(p.patience); ; {
		switch e := p.box.Send(p.fd, n.text, n.MessageInfo); {
		case e == 0:
			return nil
		case e != sys.EAGAIN:
			return e
		case time.Now().After(until):
			return errors.New("no room to send")
		}
		p.poll(unix.POLLOUT, time.Second)
	}
}

// errShutDown is what receive returns once this side's own shutdown is complete.
var errShutDown = errors.New("shut down")

// receive returns the next whole message, io.EOF after the peer's shutdown, or an error.
func (p *peer) receive() (note, error) { return p.receiveIn(p.patience) }

func (p *peer) receiveIn(d time.Duration) (note, error) {
	for until := time.Now().Add(d); ; {
		n, kind, info, e := p.box.Receive(p.fd, p.buffer)
		switch {
		case e == sys.EAGAIN && time.Now().After(until):
			return note{}, os.ErrDeadlineExceeded
		case e == sys.EAGAIN:
			p.poll(unix.POLLIN, min(time.Second, time.Until(until)+time.Millisecond))
			continue
		case e != 0:
			return note{}, e
		}
		switch kind {
		case sys.SCTPPart:
			p.rest = append(p.rest, p.buffer[:n]...)
		case sys.SCTPMessage:
			if n == 0 {
				return note{}, io.EOF
			}
			text := append(p.rest, p.buffer[:n]...)
			p.rest = nil
			return note{info, bytes.Clone(text)}, nil
		case sys.SCTPShutDown:
			if p.shut { // else the end follows
				return note{}, errShutDown
			}
		}
	}
}

func (p *peer) abort() { sys.Close(p.fd) }

func (p *peer) shutDown() error {
	p.shut = true
	if e := sys.ShutdownWrite(p.fd); e != 0 {
		return e
	}
	return nil
}

// settled waits until the other kernel has acknowledged everything.
func (p *peer) settled() error {
	return wait.Poll(patience, func() error {
		s, e := sys.SCTPStatusOf(p.fd)
		if e == 0 && s.Unsent > 0 {
			return fmt.Errorf("%d chunks are not acknowledged", s.Unsent)
		}
		return nil
	})
}

// forever is longer than a guest runs.
const forever = 24 * time.Hour

// server listens and hands each association to a function, on a goroutine of its own. A server
// does not end an association because its client is slow: that would change the record.
type server struct {
	fd   int
	addr netip.AddrPort
}

func serve(t testing.TB, in *netns.Namespace, at string, o sys.SCTPOptions, handle func(*peer)) *server {
	t.Helper()
	s := new(server)
	listen := func() (err error) {
		s.fd, err = sys.ListenSCTP(netip.MustParseAddrPort(at), o)
		return err
	}
	var err error
	if in == nil {
		err = listen()
	} else {
		err = in.Do(listen)
	}
	must.OK(t, err)
	s.addr, _ = sys.LocalAddr(s.fd)
	stop, stopped := make(chan struct{}), make(chan struct{})
	listening := newPollOnly(s.fd) // one for all waits: a test counts allocations
	go func() {
		defer close(stopped)
		for {
			fd, _, e := sys.Accept(s.fd)
			if e == 0 {
				p := newPeer(fd)
				p.patience = forever
				go handle(p)
				continue
			}
			select {
			case <-stop:
				return
			default:
				listening.poll(unix.POLLIN, 50*time.Millisecond)
			}
		}
	}()
	t.Cleanup(func() {
		close(stop)
		<-stopped
		sys.Close(s.fd)
	})
	return s
}

func newPollOnly(fd int) *peer { return &peer{fd: fd} }

// echo sends everything back until the client ends.
func echo(p *peer) {
	defer sys.CloseInOrder(p.fd)
	for {
		n, err := p.receive()
		if err != nil || p.send(n) != nil {
			return
		}
	}
}

// full reports whether the tests run at full size.
func full() bool { return os.Getenv("SLUICE_TEST_FULL") == "1" }
