package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/netns"
)

// fuzzEnd is how one side of a talk ends.
type fuzzEnd uint8

const (
	endFIN   fuzzEnd = iota // when everything is sent
	endRST                  // a reset after a part
	endClose                // close after a part, whatever is unread
	endHeld                 // never: the stop of the proxy ends it
)

func (e fuzzEnd) String() string { return [...]string{"fin", "rst", "close", "held"}[e] }

// fuzzSide is the script of one side of a talk.
type fuzzSide struct {
	data           []byte
	urgent         []int // positions of urgent bytes, ascending
	end            fuzzEnd
	cut            int           // bytes sent before endRST and endClose
	waits          bool          // sends after the other side's half has ended
	piece          int           // maximum size of one write and of one read
	pauses         int           // per thousand writes and per thousand reads
	longest        time.Duration // of a pause
	stop           time.Duration // the reader stops once for this time
	sndbuf, rcvbuf int           // 0 for the kernel's choice
}

func (s *fuzzSide) sends() int {
	if s.end == endRST || s.end == endClose {
		return s.cut
	}
	return len(s.data)
}

func (s *fuzzSide) String() string {
	return fmt.Sprintf("{%d bytes, urgent %v, %v at %d, waits %v, pieces of %d, %d pauses to %v, stops %v, buffers %d %d}",
		len(s.data), s.urgent, s.end, s.sends(), s.waits, s.piece, s.pauses, s.longest, s.stop, s.sndbuf, s.rcvbuf)
}

// fuzzTalk is the script of one connection. Both sides derive it from the seed and
// its number.
type fuzzTalk struct {
	id       uint32
	from, to int // index of the client, of the destination
	mss      int // of the client, 0 for the kernel's choice
	up, down fuzzSide
}

func (k *fuzzTalk) String() string {
	return fmt.Sprintf("talk %d, client %d, destination %d, mss %d, up %v, down %v", k.id, k.from, k.to, k.mss, &k.up, &k.down)
}

// resets tells whether a side may end by a reset.
func (k *fuzzTalk) resets() bool {
	return k.up.end == endRST || k.up.end == endClose || k.down.end == endRST || k.down.end == endClose
}

// newFuzzTalk derives a script.
func newFuzzTalk(seed uint64, id uint32, clients, destinations int) *fuzzTalk {
	r := rand.New(rand.NewPCG(seed, uint64(id)))
	k := &fuzzTalk{id: id, from: r.IntN(clients), to: r.IntN(destinations)}
	small := r.IntN(6) == 0
	if small {
		k.mss = 88 + r.IntN(600)
	}
	size := func() int {
		most := []int{1 << 7, 1 << 11, 1 << 16, 1 << 16, 1 << 18, 1 << 19, 1 << 20}[r.IntN(7)]
		if small || k.from == farClient {
			most = min(most, 1<<16)
		}
		return r.IntN(most + 1)
	}
	side := func() fuzzSide {
		n := size()
		at := r.IntN(len(noise()) - n)
		s := fuzzSide{data: noise()[at : at+n], piece: 1 << (4 + r.IntN(13)), cut: r.IntN(n + 1)}
		if r.IntN(3) == 0 {
			s.pauses, s.longest = r.IntN(20), time.Duration(1+r.IntN(20))*time.Millisecond
		}
		if r.IntN(16) == 0 {
			s.stop = time.Duration(100+r.IntN(1000)) * time.Millisecond
		}
		if r.IntN(4) == 0 {
			s.sndbuf = 1 << (11 + r.IntN(5))
		}
		if r.IntN(4) == 0 {
			s.rcvbuf = 1 << (11 + r.IntN(5))
		}
		if n > 0 && r.IntN(3) == 0 {
			for p := r.IntN(n); p < n && len(s.urgent) < 40; p += 1 + r.IntN(n) {
				s.urgent = append(s.urgent, p)
			}
		}
		// Much data in small pieces takes too long.
		s.piece = max(s.piece, n/2000)
		return s
	}
	k.up, k.down = side(), side()
	// The loopback device has segments of 64 KiB. A receiver with less than 8 KiB may close its
	// window there until the sender probes it: without a proxy, 512 KiB took two minutes.
	if k.from == nodeClient && k.up.rcvbuf > 0 {
		k.up.rcvbuf = max(k.up.rcvbuf, 8<<10)
	}
	switch r.IntN(8) {
	case 0:
		k.up.waits = true
	case 1:
		k.down.waits = true
	}
	switch r.IntN(10) {
	case 0:
		k.up.end = endRST
	case 1:
		k.down.end = endRST
	case 2:
		k.up.end = endClose
	case 3:
		k.down.end = endClose
	}
	return k
}

// heldTalk is a talk that stays open until the proxy is stopped, long after
// everything has arrived.
func heldTalk(seed uint64, id uint32, clients, destinations int) *fuzzTalk {
	k := newFuzzTalk(seed, id, clients, destinations)
	if k.from == farClient {
		k.from = nearClient
	}
	for _, s := range []*fuzzSide{&k.up, &k.down} {
		s.end, s.waits = endHeld, false
		s.data = s.data[:min(len(s.data), 1000*s.piece, 1<<18)]
		s.urgent = slices.DeleteFunc(s.urgent, func(at int) bool { return at >= len(s.data) })
	}
	return k
}

// fuzzOutcome is one side's view.
type fuzzOutcome struct {
	server    int // which one
	got, sent int // bytes; all that arrived were right
	err       error
	killed    bool // by a fault
}

func (o fuzzOutcome) String() string {
	return fmt.Sprintf("{got %d, sent %d, killed %v, %v}", o.got, o.sent, o.killed, o.err)
}

// control sets a socket's options before it connects or listens. Urgent bytes stay
// inline.
func control(mss, sndbuf, rcvbuf int) func(string, string, syscall.RawConn) error {
	return func(_, _ string, raw syscall.RawConn) error {
		var err error
		set := func(fd uintptr, level, option, value int) {
			if value > 0 && err == nil {
				err = unix.SetsockoptInt(int(fd), level, option, value)
			}
		}
		if controlErr := raw.Control(func(fd uintptr) {
			set(fd, unix.SOL_SOCKET, unix.SO_OOBINLINE, 1)
			set(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
			set(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, sndbuf)
			set(fd, unix.SOL_SOCKET, unix.SO_RCVBUF, rcvbuf)
			set(fd, unix.IPPROTO_TCP, unix.TCP_MAXSEG, mss)
		}); controlErr != nil {
			return controlErr
		}
		return err
	}
}

// play runs one side after the greeting.
func (s *fuzzSide) play(c *net.TCPConn, theirs *fuzzSide, r *rand.Rand) fuzzOutcome {
	var o fuzzOutcome
	var sent atomic.Int64
	send := func() error {
		err := s.send(c, &sent, rand.New(rand.NewPCG(r.Uint64(), 1)))
		if err != nil {
			return fmt.Errorf("send: %w", err)
		}
		switch s.end {
		case endFIN:
			return c.CloseWrite()
		case endRST:
			_ = c.SetLinger(0)
			return c.Close()
		case endClose:
			return c.Close()
		}
		return nil
	}
	if s.waits {
		if o.got, o.err = theirs.receive(c, s, r); o.err == nil {
			o.err = send()
		}
		o.sent = int(sent.Load())
		return o
	}
	done := make(chan error, 1)
	readers := rand.New(rand.NewPCG(r.Uint64(), 2))
	go func() { done <- send() }()
	o.got, o.err = theirs.receive(c, s, readers)
	err := <-done
	if o.err == nil || errors.Is(o.err, net.ErrClosed) {
		o.err = err
	}
	o.sent = int(sent.Load())
	return o
}

func (s *fuzzSide) pause(r *rand.Rand) {
	if s.pauses > 0 && r.IntN(1000) < s.pauses {
		time.Sleep(time.Duration(r.Int64N(int64(s.longest))))
	}
}

func (s *fuzzSide) send(c *net.TCPConn, sent *atomic.Int64, r *rand.Rand) error {
	marks, end := s.urgent, s.sends()
	for at := 0; at < end; sent.Store(int64(at)) {
		s.pause(r)
		if len(marks) > 0 && marks[0] == at {
			marks = marks[1:]
			if err := sendUrgent(c, s.data[at:at+1]); err != nil {
				return err
			}
			at++
			continue
		}
		to := min(end, at+1+r.IntN(s.piece))
		if len(marks) > 0 {
			to = min(to, marks[0])
		}
		n, err := c.Write(s.data[at:to])
		at += n
		if err != nil {
			sent.Store(int64(at))
			return err
		}
	}
	return nil
}

// sendUrgent sends one byte as urgent data.
func sendUrgent(c *net.TCPConn, b []byte) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	if waitErr := raw.Write(func(fd uintptr) bool {
		_, err = unix.SendmsgN(int(fd), b, nil, nil, unix.MSG_OOB|unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		return !errors.Is(err, unix.EAGAIN)
	}); waitErr != nil {
		return waitErr
	}
	return err
}

// receive reads what side s sends until its half ends, with the reader's habits.
func (s *fuzzSide) receive(c *net.TCPConn, reader *fuzzSide, r *rand.Rand) (int, error) {
	pooled := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(pooled)
	buf := *pooled
	got, stopAt := 0, -1
	if reader.stop > 0 && len(s.data) > 0 {
		stopAt = r.IntN(len(s.data))
	}
	for {
		reader.pause(r)
		if stopAt >= 0 && got >= stopAt {
			stopAt = -1
			time.Sleep(reader.stop)
		}
		n, err := c.Read(buf[:1+r.IntN(min(reader.piece, len(buf)))])
		if n > 0 {
			if got+n > len(s.data) || !bytes.Equal(buf[:n], s.data[got:got+n]) {
				return got, fmt.Errorf("%w after %d", errWrongBytes, got)
			}
			got += n
		}
		if err == io.EOF {
			return got, nil
		}
		if err != nil {
			return got, err
		}
	}
}

// errUnnoticed: a side waited for a reset in vain. TCP does not repeat resets. One
// that overtakes lost bytes must be confirmed by its sender, and that packet may
// be lost too, or the sender may be gone.
var errUnnoticed = errors.New("a reset was not noticed")

// judge describes what is wrong with what both sides saw.
func (k *fuzzTalk) judge(client, server fuzzOutcome) error {
	if errors.Is(client.err, errWrongBytes) || errors.Is(server.err, errWrongBytes) {
		return errWrongBytes
	}
	if server.killed {
		if k.up.end == endFIN && client.err == nil && client.got < k.down.sends() {
			return errorText("the endpoint was reset, the client saw the end of the stream")
		}
		return nil
	}
	if k.resets() && (errors.Is(client.err, os.ErrDeadlineExceeded) || errors.Is(server.err, os.ErrDeadlineExceeded)) {
		return errUnnoticed
	}
	one := func(name string, o fuzzOutcome, mine, theirs *fuzzSide) error {
		switch {
		case mine.end == endRST || mine.end == endClose:
			return nil // the other side has left
		case theirs.end == endRST || theirs.end == endHeld:
			if !wasReset(o.err) {
				return fmt.Errorf("the %s saw no reset", name)
			}
		case theirs.end == endClose:
			if wasReset(o.err) {
				return nil
			}
			if o.err != nil || o.got != theirs.sends() {
				return fmt.Errorf("the %s missed something before the close", name)
			}
		case o.err != nil:
			return fmt.Errorf("the %s failed", name)
		case o.got != theirs.sends():
			return fmt.Errorf("the %s got %d of %d bytes", name, o.got, theirs.sends())
		}
		return nil
	}
	return errors.Join(one("client", client, &k.up, &k.down), one("server", server, &k.down, &k.up))
}

// compare describes what is wrong with the record of a correct talk.
func (k *fuzzTalk) compare(r record, client, server fuzzOutcome) error {
	if r.BytesUp < uint64(server.got+greetingUp) || r.BytesDown < uint64(client.got+greetingDown) {
		return errorText("the record has fewer bytes than arrived")
	}
	if r.BytesUp > uint64(client.sent+greetingUp+k.up.piece) || r.BytesDown > uint64(server.sent+greetingDown+k.down.piece) {
		return errorText("the record has more bytes than were sent")
	}
	if server.killed {
		return nil
	}
	want := "client_fin or endpoint_fin"
	switch up, down := &k.up, &k.down; {
	case up.end == endHeld:
		want = "shutdown"
	case up.end == endClose || down.end == endClose:
		return nil
	case up.end == endRST:
		want = "client_reset"
	case down.end == endRST:
		want = "endpoint_reset"
	case up.waits:
		want = "endpoint_fin"
	case down.waits:
		want = "client_fin"
	}
	if k.resets() && r.End == "shutdown" {
		return errUnnoticed // by the proxy
	}
	if !strings.Contains(want, r.End) {
		return fmt.Errorf("the record's end is %s, want %s", r.End, want)
	}
	if k.resets() || k.up.end == endHeld && server.server == farServer {
		return nil // some bytes may have been in flight
	}
	if r.BytesUp != uint64(len(k.up.data)+greetingUp) || r.BytesDown != uint64(len(k.down.data)+greetingDown) {
		return errorText("the record's bytes are wrong")
	}
	return nil
}

// wasReset is isReset, for a reset that a read reported, where the error is that
// of ending the other half.
func wasReset(err error) bool { return isReset(err) || errors.Is(err, syscall.ENOTCONN) }

// fuzzServer plays the endpoints' sides.
type fuzzServer struct {
	script func(id uint32) *fuzzTalk
	index  int

	mu       sync.Mutex
	l        net.Listener                  // guarded by mu
	conns    map[*net.TCPConn]*atomic.Bool // whether a fault killed it; guarded by mu
	told     func(k *fuzzTalk, outcome fuzzOutcome)
	met      func(k *fuzzTalk) // called for each greeting
	deadline func(k *fuzzTalk) time.Time
}

// serve accepts until the listener is closed.
func (s *fuzzServer) serve(l net.Listener) {
	netns.Accept(l, func(c net.Conn) {
		conn := c.(*net.TCPConn)
		killed := &atomic.Bool{}
		s.mu.Lock()
		dead := s.l != l
		s.conns[conn] = killed
		s.mu.Unlock()
		if dead {
			reset(conn)
		}
		go s.one(conn, killed)
	})
}

func (s *fuzzServer) one(c *net.TCPConn, killed *atomic.Bool) {
	defer c.Close()
	defer s.leave(c)
	_ = c.SetDeadline(time.Now().Add(fuzzPatience))
	var number [greetingUp]byte
	if _, err := io.ReadFull(c, number[:]); err != nil {
		return // an abandoned attempt
	}
	id := binary.BigEndian.Uint32(number[:])
	k := s.script(id)
	s.met(k)
	if k.down.sndbuf > 0 {
		_ = c.SetWriteBuffer(k.down.sndbuf)
	}
	if k.down.rcvbuf > 0 {
		_ = c.SetReadBuffer(k.down.rcvbuf)
	}
	_ = c.SetDeadline(s.deadline(k))
	o := fuzzOutcome{}
	if _, o.err = c.Write([]byte{byte(s.index)}); o.err == nil {
		o = k.down.play(c, &k.up, rand.New(rand.NewPCG(uint64(id), 7)))
	}
	s.leave(c) // until now, a fault may reset it and so lose what the kernel still holds
	o.killed, o.server = killed.Load(), s.index
	s.told(k, o)
}

// leave takes a connection from those that a fault kills.
func (s *fuzzServer) leave(c *net.TCPConn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.conns, c)
}

// kill ends the server as a crash of its host would: it closes its port and resets
// its connections.
func (s *fuzzServer) kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.l != nil {
		_ = s.l.Close()
		s.l = nil
	}
	for c, killed := range s.conns {
		killed.Store(true)
		reset(c)
	}
}

func reset(c *net.TCPConn) {
	_ = c.SetLinger(0)
	_ = c.Close()
}
