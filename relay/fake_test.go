package relay

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// fake is a scripted kernel and event loop with two sockets. It is as unhelpful as
// Linux may be: it reports edges only after a change, and writability only after a
// short write; a pipe holds few pieces; and the peers may act between any two
// system calls.
type fake struct {
	choose  func(n int) int // 0 to n-1: the script
	meddle  func()          // called after each system call
	socks   [2]*fakeSock
	pipes   map[int]*fakePipe // by both descriptors
	shared  bool              // another process has all descriptors too
	left    int               // closed while shared
	nextFD  int
	noPipes bool
	now     int64
	timers  map[*poll.Timer]fakeTimer
	ticks   []func()
	noWait  bool
	calls   int
	fault   string // what the code under test did wrong
}

type fakeTimer struct {
	at int64
	h  poll.TimerHandler
}

// fakeSock is one of the relay's sockets and its peer. Bytes are not stored: their
// offset in the stream determines them.
type fakeSock struct {
	side int
	fd   int

	// From the peer.
	sent  int  // bytes that have arrived
	read  int  // of those: read by the relay
	fin   bool // FIN has arrived
	reset bool // RST has arrived, or the connection timed out
	err   sys.Errno
	quiet bool // no event tells of the mark
	mark  int  // offset of the last urgent byte, if it was not read yet; else less than read

	signalled bool // a read was cut short by a signal: the next is not

	// To the peer.
	room     int // what the send buffer takes now
	capacity int
	got      int  // bytes that were written
	refused  bool // a write was cut short: the kernel will say when there is room
	cut      bool // the last write was cut short
	shut     bool
	deaf     bool // the peer has closed: it answers bytes with RST

	pending    bool  // bytes to the peer are not acknowledged
	acked      int64 // when the peer last acknowledged something
	unanswered int   // retransmissions since then
	rtt        time.Duration
	noDelay    bool
	buffer     int // for what is received; 0: as it began, -1: grows by itself
	unsent     int // what may wait to be sent; 0: as it began
	looks      int // how often the kernel was asked for these

	closed  bool
	inOrder bool // it was not closed by a reset
	live    bool // liveness options are set
	handler poll.Handler
	watched bool // in epoll
	tag     uint8
	mask    poll.Events
	gen     int
	edge    bool
}

// fakePipe holds pieces of one stream.
type fakePipe struct {
	r, w   int
	size   int
	slots  int
	pieces []int // lengths
	from   int   // offset of the first byte
	side   int   // the stream; -1 while only written says

	written []byte
}

func (p *fakePipe) bytes() (n int) {
	for _, piece := range p.pieces {
		n += piece
	}
	return n
}

const pageSize = 4096

func newFake(choose func(int) int) *fake {
	f := &fake{choose: choose, meddle: func() {}, pipes: map[int]*fakePipe{}, nextFD: 10, now: 1e9, timers: map[*poll.Timer]fakeTimer{}}
	f.newSocks()
	return f
}

// newSocks makes two fresh sockets.
func (f *fake) newSocks() {
	for i := range f.socks {
		f.socks[i] = &fakeSock{side: i, fd: f.nextFD, mark: -1, room: 1 << 20, capacity: 1 << 20}
		f.nextFD++
	}
}

// streams are what each side sends, over and over; their length is a prime, so
// that no power of two fits in.
var streams = func() (s [2][]byte) {
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range s {
		s[i] = make([]byte, 1<<20-3)
		for j := range s[i] {
			s[i][j] = byte(rng.Uint32())
		}
	}
	return s
}()

// streamAt fills p with what a side sends from an offset on.
func streamAt(p []byte, side, offset int) {
	for len(p) > 0 {
		n := copy(p, streams[side][offset%len(streams[side]):])
		p = p[n:]
		offset += n
	}
}

// isStreamAt reports whether p is what a side sends from an offset on.
func isStreamAt(p []byte, side, offset int) bool {
	for len(p) > 0 {
		want := streams[side][offset%len(streams[side]):]
		n := min(len(p), len(want))
		if !bytes.Equal(p[:n], want[:n]) {
			return false
		}
		p = p[n:]
		offset += n
	}
	return true
}

func (f *fake) failf(format string, args ...any) {
	if f.fault == "" {
		f.fault = fmt.Sprintf(format, args...)
	}
}

func (f *fake) sock(fd int) *fakeSock {
	f.calls++
	for _, s := range f.socks {
		if s.fd == fd {
			if s.closed {
				f.failf("system call on a closed descriptor (side %d)", s.side)
			}
			return s
		}
	}
	f.failf("system call on descriptor %d", fd)
	return &fakeSock{}
}

// What the peers do.

func (f *fake) peerSends(i, n int) {
	s := f.socks[i]
	if s.fin || s.reset || n == 0 {
		return
	}
	s.sent += n
	s.edge = true
}

func (f *fake) peerSendsUrgent(i int) {
	s := f.socks[i]
	if s.fin || s.reset {
		return
	}
	s.mark = s.sent
	s.sent++
	s.edge = true
}

func (f *fake) peerCloses(i int, deaf bool) {
	s := f.socks[i]
	if s.reset {
		return
	}
	s.fin, s.edge = true, true
	s.deaf = s.deaf || deaf
}

func (f *fake) peerResets(i int, why sys.Errno) {
	s := f.socks[i]
	if s.reset {
		return
	}
	s.reset, s.edge = true, true
	s.err = why
	if s.fin && why == sys.ECONNRESET {
		s.err = sys.EPIPE // Linux, after a FIN
	}
}

// peerReads makes room for n more bytes.
func (f *fake) peerReads(i, n int) {
	s := f.socks[i]
	s.room = min(s.room+n, s.capacity)
	if s.refused && s.room >= (s.capacity+2)/3 {
		s.refused = false
		s.edge = true
	}
}

// The system calls.

// kernel returns the system calls of the fake.
func (f *fake) kernel() *kernel {
	return &kernel{
		recv:              f.recv,
		unread:            f.unread,
		send:              f.send,
		splice:            f.splice,
		shutdownWrite:     f.shutdownWrite,
		setLiveness:       f.setLiveness,
		growReceiveBuffer: f.growReceiveBuffer,
		freeReceiveBuffer: f.freeReceiveBuffer,
		limitUnsent:       f.limitUnsent,
		setNoDelay:        f.setNoDelay,
		delivery:          f.delivery,
		socketError:       f.socketError,
		close:             f.close,
		closeInOrder:      f.closeInOrder,
		pipe:              f.pipe,
		setPipeSize:       f.setPipeSize,
		write:             f.write,
	}
}

// readable is how much one read takes: up to an urgent mark, and the byte at the
// mark only at the beginning of a read.
func (s *fakeSock) readable() int {
	if s.mark > s.read {
		return s.mark - s.read
	}
	return s.sent - s.read
}

func (f *fake) recv(fd int, p []byte) (int, sys.Errno) {
	defer f.meddle()
	s := f.sock(fd)
	if s.mark == s.read && !s.signalled && f.choose(4) == 0 {
		s.signalled = true
		return -1, sys.EAGAIN // a signal came in at the urgent byte
	}
	s.signalled = false
	if n := min(s.readable(), len(p)); n > 0 {
		streamAt(p[:n], s.side, s.read)
		s.read += n
		return n, 0
	}
	return s.atEnd()
}

func (s *fakeSock) atEnd() (int, sys.Errno) {
	switch {
	case s.fin:
		return 0, 0
	case s.err != 0:
		e := s.err
		s.err = 0
		return -1, e
	case s.reset:
		return 0, 0
	}
	return -1, sys.EAGAIN
}

// writable is what a write of n bytes comes to.
func (f *fake) writable(s *fakeSock, n int) (int, sys.Errno) {
	if s.shut {
		f.failf("write to side %d after its FIN", s.side)
	}
	if s.deaf && n > 0 && !s.reset {
		// The bytes are taken, and answered with RST.
		f.peerResets(s.side, sys.ECONNRESET)
		return n, 0
	}
	if s.err != 0 {
		e := s.err
		s.err = 0
		return -1, e
	}
	if s.reset {
		return -1, sys.EPIPE
	}
	k := min(n, s.room)
	s.cut = k < n
	if s.cut {
		s.refused = true
	}
	if k == 0 && n > 0 {
		return -1, sys.EAGAIN
	}
	return k, 0
}

func (f *fake) unread(fd int) (int, sys.Errno) {
	s := f.sock(fd)
	return s.sent - s.read, 0
}

func (f *fake) send(fd int, p []byte, more bool) (int, sys.Errno) {
	defer f.meddle()
	s := f.sock(fd)
	n, e := f.writable(s, len(p))
	if e != 0 {
		return -1, e
	}
	if !isStreamAt(p[:n], 1-s.side, s.got) {
		f.failf("side %d: wrong bytes from %d on", s.side, s.got)
	}
	f.wrote(s, n)
	if more && n == len(p) {
		src := f.socks[1-s.side]
		if !src.fin || src.read != src.sent {
			f.failf("side %d: bytes are held back and no FIN follows", s.side)
		}
	}
	return n, 0
}

func (f *fake) wrote(s *fakeSock, n int) {
	if !s.reset {
		s.room -= n
	}
	s.got += n
	if s.got > f.socks[1-s.side].sent {
		f.failf("side %d: %d bytes written, %d sent", s.side, s.got, f.socks[1-s.side].sent)
	}
}

func (f *fake) splice(from, to, n int) (int, sys.Errno) {
	defer f.meddle()
	if p := f.pipes[to]; p != nil {
		return f.fill(p, f.sock(from), n)
	}
	p := f.pipes[from]
	if p == nil {
		f.failf("splice from %d to %d", from, to)
		return -1, sys.EINVAL
	}
	s := f.sock(to)
	if len(p.pieces) == 0 {
		f.failf("splice from an empty pipe")
		return -1, sys.EAGAIN
	}
	if n != p.bytes() {
		f.failf("splice of %d bytes from a pipe that holds %d: the last segment could be held back", n, p.bytes())
	}
	if p.side < 0 { // written: the bytes after those that the side has
		p.side, p.from = 1-s.side, s.got
		if n != f.socks[1-s.side].read-s.got || !isStreamAt(p.written, p.side, p.from) {
			f.failf("side %d: the pipe has other bytes than those from %d on", s.side, s.got)
		}
	}
	if p.side != 1-s.side || p.from != s.got {
		f.failf("side %d: the pipe's bytes begin at %d, written were %d", s.side, p.from, s.got)
	}
	if n > 1 && f.choose(8) == 0 {
		n = 1 + f.choose(n-1) // it stops for a signal: that is no want of room
	}
	k, e := f.writable(s, n)
	if e != 0 {
		return -1, e
	}
	f.wrote(s, k)
	p.from += k
	for left := k; left > 0; {
		if p.pieces[0] > left {
			p.pieces[0] -= left
			break
		}
		left -= p.pieces[0]
		p.pieces = p.pieces[1:]
	}
	return k, 0
}

// fill splices from a socket into a pipe, in pieces of any size up to a page.
func (f *fake) fill(p *fakePipe, s *fakeSock, n int) (int, sys.Errno) {
	avail := s.readable()
	if s.mark == s.read {
		return s.atEnd() // splice never passes the urgent byte: to it the stream ends here
	}
	if avail == 0 {
		return s.atEnd()
	}
	if len(p.pieces) == 0 {
		p.side, p.from = s.side, s.read
	}
	if p.side != s.side || p.from+p.bytes() != s.read {
		f.failf("a pipe with bytes of another stream is filled")
	}
	total := 0
	for avail > 0 && n > 0 && len(p.pieces) < p.slots {
		piece := min(avail, n, pageSize)
		if f.choose(3) == 0 {
			piece = 1 + f.choose(piece)
		}
		p.pieces = append(p.pieces, piece)
		avail -= piece
		n -= piece
		total += piece
	}
	if total == 0 {
		return -1, sys.EAGAIN // the pipe is full
	}
	s.read += total
	return total, 0
}

// write writes to a pipe, in pieces of a page.
func (f *fake) write(fd int, p []byte) (int, sys.Errno) {
	to := f.pipes[fd]
	if len(to.pieces) > 0 {
		f.failf("a pipe with bytes is written to")
	}
	to.side, to.written = -1, bytes.Clone(p)
	n := 0
	for n < len(p) && len(to.pieces) < to.slots {
		to.pieces = append(to.pieces, min(len(p)-n, pageSize))
		n += to.pieces[len(to.pieces)-1]
	}
	return n, 0
}

func (f *fake) shutdownWrite(fd int) sys.Errno {
	defer f.meddle()
	s := f.sock(fd)
	if s.shut {
		f.failf("side %d: FIN twice", s.side)
	}
	s.shut = true
	if s.reset {
		return sys.ENOTCONN
	}
	return 0
}

func (f *fake) setLiveness(fd int, _ sys.Liveness) sys.Errno {
	f.sock(fd).live = true
	return 0
}

func (f *fake) delivery(fd int) (sys.Delivery, sys.Errno) {
	s := f.sock(fd)
	s.looks++
	return sys.Delivery{Pending: s.pending, Silence: time.Duration(f.now - s.acked), Unanswered: s.unanswered, RTT: s.rtt}, 0
}

func (f *fake) growReceiveBuffer(fd, bytes int) { f.sock(fd).buffer = bytes }

func (f *fake) freeReceiveBuffer(fd int) { f.sock(fd).buffer = -1 }

func (f *fake) setNoDelay(fd int) sys.Errno {
	f.sock(fd).noDelay = true
	return 0
}

func (f *fake) limitUnsent(fd, bytes int) sys.Errno {
	f.sock(fd).unsent = bytes
	return 0
}

func (f *fake) socketError(fd int) sys.Errno {
	s := f.sock(fd)
	e := s.err
	s.err = 0
	return e
}

func (f *fake) closeInOrder(fd int) {
	f.sock(fd).inOrder = true
	f.close(fd)
}

func (f *fake) close(fd int) {
	if f.shared {
		f.left++
		return
	}
	if p := f.pipes[fd]; p != nil {
		delete(f.pipes, fd)
		return
	}
	s := f.sock(fd)
	s.closed = true
	if s.handler != nil {
		f.failf("side %d is closed and still registered", s.side)
	}
}

func (f *fake) pipe() (r, w int, e sys.Errno) {
	if f.noPipes || f.choose(20) == 0 {
		return -1, -1, sys.EMFILE
	}
	p := &fakePipe{r: f.nextFD, w: f.nextFD + 1, size: 2 * pageSize, slots: 2}
	f.nextFD += 2
	f.pipes[p.r], f.pipes[p.w] = p, p
	return p.r, p.w, 0
}

func (f *fake) setPipeSize(fd, bytes int) (int, sys.Errno) {
	if f.choose(10) == 0 {
		return -1, sys.EPERM
	}
	p := f.pipes[fd]
	p.slots = bytes / pageSize
	p.size = bytes
	return bytes, 0
}
