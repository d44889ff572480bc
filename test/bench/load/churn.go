package load

import (
	"encoding/binary"

	"golang.org/x/sys/unix"
)

// churner opens a connection in each of its places, exchanges one request and
// response on it, closes it and opens the next one.
type churner struct {
	m       meter
	poll    *poller
	spec    Spec
	targets *rotation
	sources *rotation
	places  []place
	limit   uint64 // maximum number of connections of this churner; 0 for no limit
	total   uint64
	number  uint64
	swept   int64
	buf     [2 * MessageSize]byte
}

// place holds one connection at a time.
type place struct {
	fd      int // -1 while there is none
	number  uint64
	got     int
	started int64
	retryAt int64 // time of the next attempt after an error
	sent    bool
}

// afterError is a place's pause after a failed connection, so that a broken relay
// does not get a storm of attempts.
const afterError = 1e6 // ns

func newChurner(spec Spec, clients int) (*churner, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	port := uint16(PortEcho)
	if spec.Close == ServerCloses {
		port = PortOnce
	}
	c := &churner{poll: p, spec: spec, targets: spec.targets(port), sources: spec.sources(), places: make([]place, clients)}
	if spec.MaxConns > 0 {
		c.limit = max(spec.MaxConns*uint64(clients)/uint64(spec.Clients), 1)
	}
	return c, nil
}

func (c *churner) meter() *meter { return &c.m }

func (c *churner) run(w window) {
	c.m.open(w)
	for i := range c.places {
		c.places[i].fd = -1
		c.open(i, now())
	}
	for t := now(); c.m.tick(t); t = now() {
		if c.limit > 0 && c.total >= c.limit {
			c.m.stop = t
			break
		}
		if t-c.swept > 2*afterError {
			c.sweep(t)
		}
		for _, ev := range c.poll.wait(10) {
			c.handle(int(ev.Fd), ev.Events)
		}
	}
	for i := range c.places {
		if c.places[i].fd >= 0 {
			closeFD(c.places[i].fd)
		}
	}
}

// open dials in a place. epoll watches the socket edge-triggered, once for all
// events.
func (c *churner) open(i int, t int64) {
	p := &c.places[i]
	c.number++
	*p = place{fd: -1, number: c.number<<8 | uint64(i&0xff), started: t}
	fd, errno := dial(c.targets.next(), c.sources.next())
	if errno != 0 {
		cause := errno.Error()
		if errno == unix.EADDRNOTAVAIL {
			cause = "the load generator ran out of ports"
		}
		c.fail(i, cause, t)
		return
	}
	p.fd = fd
	c.poll.add(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLRDHUP|1<<31, int32(i)) // 1<<31: edges
}

func (c *churner) handle(i int, events uint32) {
	p := &c.places[i]
	if events&unix.EPOLLERR != 0 {
		code, _ := unix.GetsockoptInt(p.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		c.fail(i, unix.Errno(code).Error(), now())
		return
	}
	if !p.sent {
		if events&unix.EPOLLOUT == 0 {
			return
		}
		p.sent = true
		binary.NativeEndian.PutUint64(c.buf[:], p.number)
		if n, errno := write(p.fd, c.buf[:MessageSize]); n != MessageSize {
			c.fail(i, errno.Error(), now())
			return
		}
		return // an answer that has already arrived is a separate edge
	}
	if events&(unix.EPOLLIN|unix.EPOLLRDHUP) == 0 {
		return
	}
	if p.got < MessageSize {
		n, errno := read(p.fd, c.buf[p.got:MessageSize+1])
		switch {
		case errno == unix.EAGAIN:
			return
		case errno != 0:
			c.fail(i, errno.Error(), now())
			return
		case n == 0:
			c.fail(i, "closed without a response", now())
			return
		}
		if p.got == 0 && n >= 8 && binary.NativeEndian.Uint64(c.buf[:]) != p.number || p.got+n > MessageSize {
			c.fail(i, "wrong response", now())
			return
		}
		p.got += n
	}
	if p.got == MessageSize && (c.spec.Close != ServerCloses || events&unix.EPOLLRDHUP != 0) {
		c.finish(i)
	}
}

func (c *churner) finish(i int) {
	p := &c.places[i]
	if c.spec.Close == ClientResets {
		resetOnClose(p.fd)
	}
	closeFD(p.fd)
	t := now()
	c.total++
	c.m.done(t, p.started)
	if c.spec.Every > 0 {
		p.fd, p.retryAt = -1, p.started+int64(c.spec.Every)
		return
	}
	c.open(i, t)
}

func (c *churner) fail(i int, cause string, t int64) {
	c.m.failed(cause)
	p := &c.places[i]
	if p.fd >= 0 {
		closeFD(p.fd)
		p.fd = -1
	}
	p.retryAt = t + afterError
}

// sweep dials again where that is due, and gives up connections without progress.
func (c *churner) sweep(t int64) {
	c.swept = t
	for i := range c.places {
		p := &c.places[i]
		switch {
		case p.fd < 0 && t >= p.retryAt:
			c.open(i, t)
		case p.fd >= 0 && t-p.started > int64(noProgress):
			c.fail(i, "timed out", t)
		}
	}
}
