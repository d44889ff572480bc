package load

import (
	"encoding/binary"
	"fmt"

	"golang.org/x/sys/unix"
)

// echoer sends a request on each of its connections, and the next one when the
// response has arrived.
type echoer struct {
	m     meter
	poll  *poller
	conns []exchange
	size  int // of a message
	buf   []byte
}

// exchange is a request that waits for its response. Every request carries a
// number, which the response repeats.
type exchange struct {
	fd     int
	number uint64
	got    int // bytes of the response
	sent   int64
}

func newEchoer(targets *rotation, clients, size int) (*echoer, error) {
	p, err := newPoller()
	if err != nil {
		return nil, err
	}
	e := &echoer{poll: p, conns: make([]exchange, clients), size: size, buf: make([]byte, size+1)}
	for i := range e.conns {
		target := targets.next()
		fd, err := connected(target)
		if err != nil {
			return nil, fmt.Errorf("client %d: %w", i, err)
		}
		o := target.noDelay()
		setOption(fd, o[0], o[1], o[2])
		if errno := p.add(fd, unix.EPOLLIN, int32(i)); errno != 0 {
			return nil, fmt.Errorf("epoll: %w", errno)
		}
		e.conns[i] = exchange{fd: fd, number: uint64(i) << 40}
	}
	return e, nil
}

func (e *echoer) meter() *meter { return &e.m }

func (e *echoer) run(w window) {
	e.m.open(w)
	for i := range e.conns {
		e.request(&e.conns[i], now())
	}
	for e.m.tick(now()) {
		for _, ev := range e.poll.wait(20) {
			e.receive(&e.conns[ev.Fd])
		}
	}
	for i := range e.conns {
		c := &e.conns[i]
		if c.fd >= 0 && e.m.stop-c.sent > int64(noProgress) {
			e.m.failed("no response")
		}
	}
}

func (e *echoer) request(c *exchange, t int64) {
	c.number++
	c.got, c.sent = 0, t
	binary.NativeEndian.PutUint64(e.buf, c.number)
	// An idle connection's buffer has room for a whole request.
	if n, errno := write(c.fd, e.buf[:e.size]); errno != 0 || n != e.size {
		e.drop(c, errno.Error())
	}
}

func (e *echoer) receive(c *exchange) {
	n, errno := read(c.fd, e.buf[c.got:e.size+1])
	switch {
	case errno == unix.EAGAIN:
		return
	case errno != 0:
		e.drop(c, errno.Error())
		return
	case n == 0:
		e.drop(c, "closed by peer")
		return
	}
	if c.got == 0 && n >= 8 && binary.NativeEndian.Uint64(e.buf) != c.number || c.got+n > e.size {
		e.drop(c, "wrong response")
		return
	}
	if c.got += n; c.got == e.size {
		t := now()
		e.m.done(t, c.sent)
		e.request(c, t)
	}
}

func (e *echoer) drop(c *exchange, cause string) {
	e.m.failed(cause)
	closeFD(c.fd)
	c.fd = -1
}
