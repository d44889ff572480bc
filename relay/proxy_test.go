package relay

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// proxy is the least that makes a proxy of a relay: it accepts on each loop and
// connects to one endpoint.
type proxy struct {
	t         testing.TB
	addr      netip.AddrPort
	endpoint  netip.AddrPort
	listener  int
	relay     *Relay
	accepters []*accepter
	ends      chan ended
	refused   atomic.Int64
}

// accepter is one event loop of a proxy.
type accepter struct {
	p      *proxy
	loop   *poll.Loop
	worker *Worker
	conns  map[*conn]struct{}
}

// conn is one connection through a proxy.
type conn struct {
	Link
	accepter         *accepter
	client, endpoint int
	reg              poll.Registration
}

// ended is what a link said at its end.
type ended struct {
	end      End
	up, down uint64
}

// newProxy runs a proxy until the test ends. It keeps the ends of its links only
// if there is room for them.
func newProxy(t testing.TB, loops int, endpoint netip.AddrPort, config Config) *proxy {
	t.Helper()
	p := &proxy{t: t, endpoint: endpoint, relay: New(config), ends: make(chan ended, 1000)}
	var err error
	if p.listener, err = sys.ListenTCP(loopback, sys.ListenOptions{}); err != nil {
		t.Fatal(err)
	}
	p.addr, _ = sys.LocalAddr(p.listener)
	for range loops {
		loop := must.Get(poll.New())(t)
		ln := &accepter{p: p, loop: loop, worker: p.relay.NewWorker(loop), conns: map[*conn]struct{}{}}
		must.OK(t, must.Err(loop.Add(p.listener, 0, poll.Readable|poll.Exclusive, ln)))
		p.accepters = append(p.accepters, ln)
	}
	var running sync.WaitGroup
	for _, ln := range p.accepters {
		running.Go(func() {
			check.OK(t, ln.loop.Run())
		})
	}
	t.Cleanup(func() {
		for _, ln := range p.accepters {
			ln.loop.Post(ln.stop)
			ln.loop.Stop()
		}
		running.Wait()
		sys.Close(p.listener)
		check.Equalf(t, p.relay.Pipes(), 0, "pipes are left")
		if s := p.stats(); s.Open != 0 || s.Held != 0 {
			t.Errorf("left: %+v", s)
		}
	})
	return p
}

var loopback = netip.MustParseAddrPort("127.0.0.1:0")

func (ln *accepter) stop() {
	for c := range ln.conns {
		ln.worker.Abort(&c.Link, Shutdown)
	}
	ln.worker.Close()
}

// HandleEvents accepts.
func (ln *accepter) HandleEvents(uint8, poll.Events) {
	for range 16 {
		fd, _, e := sys.Accept(ln.p.listener)
		if e != 0 {
			return
		}
		c := &conn{accepter: ln, client: fd}
		c.endpoint, _ = sys.ConnectTCP(ln.p.endpoint, netip.AddrPort{}, sys.ConnectOptions{})
		if c.endpoint < 0 {
			ln.p.refused.Add(1)
			sys.Close(fd)
			continue
		}
		ln.conns[c] = struct{}{}
		switch e := ln.worker.Probe(&c.Link, c.client, c.endpoint); e {
		case 0:
			c.start(0)
		case sys.EAGAIN:
			var err error
			if c.reg, err = ln.loop.Add(c.endpoint, 0, Watch, c); err != nil {
				ln.p.t.Error(err)
			}
		default:
			c.fail()
		}
	}
}

// HandleEvents hears how the connect came out.
func (c *conn) HandleEvents(_ uint8, ev poll.Events) {
	if ev&poll.Failed != 0 {
		c.fail()
		return
	}
	c.start(ev)
}

func (c *conn) start(ev poll.Events) {
	c.accepter.worker.Start(&c.Link, Socket{FD: c.client}, Socket{FD: c.endpoint, Reg: c.reg, Ready: ev}, c)
}

func (c *conn) fail() {
	ln := c.accepter
	ln.worker.Drop(&c.Link)
	ln.loop.Forget(c.reg)
	sys.Close(c.endpoint)
	sys.Close(c.client)
	delete(ln.conns, c)
	ln.p.refused.Add(1)
}

func (c *conn) LinkEnded(l *Link, end End) {
	delete(c.accepter.conns, c)
	select {
	case c.accepter.p.ends <- ended{end, l.BytesUp(), l.BytesDown()}:
	default:
	}
}

// stats sums up the workers' counters.
func (p *proxy) stats() (sum Stats) {
	for _, ln := range p.accepters {
		done := make(chan struct{})
		if ln.loop.Post(func() { ln.worker.publish(); close(done) }) {
			<-done
		}
		s := ln.worker.Stats()
		sum.Links += s.Links
		sum.Open += s.Open
		sum.Bytes += s.Bytes
		sum.Spliced += s.Spliced
		sum.Reads += s.Reads
		sum.Writes += s.Writes
		sum.Splices += s.Splices
		sum.Shuts += s.Shuts
		sum.Closes += s.Closes
		sum.Controls += s.Controls
		sum.Others += s.Others
		sum.Held += s.Held
		sum.Promoted += s.Promoted
		sum.NoPipe += s.NoPipe
	}
	return sum
}

// waits sums up the calls to wait for events.
func (p *proxy) waits() (n uint64) {
	for _, ln := range p.accepters {
		n += ln.loop.Waits()
	}
	return n
}

func (p *proxy) dial() *net.TCPConn {
	p.t.Helper()
	c := must.Get(net.Dial("tcp", p.addr.String()))(p.t)
	p.t.Cleanup(func() { c.Close() })
	c.SetDeadline(time.Now().Add(60 * time.Second))
	return c.(*net.TCPConn)
}

// dialReset makes a connection that the proxy is expected to reset.
func (p *proxy) dialReset() {
	p.t.Helper()
	c, err := net.Dial("tcp", p.addr.String())
	if err == nil {
		defer c.Close()
		c.SetDeadline(time.Now().Add(60 * time.Second))
		_, err = io.WriteString(c, "hello")
		if err == nil {
			_, err = io.ReadAll(c)
		}
	}
	if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		p.t.Fatalf("not reset: %v", err)
	}
}

func (p *proxy) end() ended {
	p.t.Helper()
	select {
	case e := <-p.ends:
		return e
	case <-time.After(30 * time.Second):
		p.t.Fatal("the link does not end")
		return ended{}
	}
}

// backend listens for the proxy's connections and serves each with f.
func backend(t testing.TB, f func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	return backendOn(t, "127.0.0.1:0", f)
}

func backendOn(t testing.TB, addr string, f func(*net.TCPConn)) netip.AddrPort {
	t.Helper()
	ln := must.Get(net.Listen("tcp", addr))(t)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer c.Close()
				f(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() { ln.Close(); serving.Wait() })
	return ln.Addr().(*net.TCPAddr).AddrPort()
}

// handover is a backend that gives its connections to the test.
func handover(t testing.TB) (netip.AddrPort, <-chan *net.TCPConn) {
	conns := make(chan *net.TCPConn, 100)
	done := make(chan struct{})
	addr := backend(t, func(c *net.TCPConn) {
		c.SetDeadline(time.Now().Add(60 * time.Second))
		conns <- c
		<-done
	})
	t.Cleanup(func() { close(done) })
	return addr, conns
}

// echo sends back what comes and closes when the other side does. (io.Copy alone
// would splice, and hold a pipe.)
func echo(c *net.TCPConn) { io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) }

// noLeak checks at the end of the test that no descriptor and no goroutine is
// left.
func noLeak(t *testing.T) {
	t.Helper()
	// What Go's own network code opens once, and keeps.
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	_ = l.Close()
	goroutines, fds := runtime.NumGoroutine(), openFiles(t)
	t.Cleanup(func() {
		deadline := time.Now().Add(10 * time.Second)
		for runtime.NumGoroutine() > goroutines || openFiles(t) > fds {
			if time.Now().After(deadline) {
				t.Fatalf("left: %d goroutines and %d descriptors", runtime.NumGoroutine()-goroutines, openFiles(t)-fds)
			}
			runtime.Gosched()
		}
	})
}

func openFiles(t testing.TB) int {
	list := must.Get(os.ReadDir("/proc/self/fd"))(t)
	return len(list)
}
