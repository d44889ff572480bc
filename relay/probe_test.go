package relay

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// probeLab is a client's connection and the one to an endpoint that is made for
// it.
type probeLab struct {
	worker   *Worker
	link     Link
	client   *net.TCPConn
	clientFD int
	upstream int
	end      End
}

func (p *probeLab) LinkEnded(_ *Link, end End) { p.end = end }

// newProbeLab connects a client and an endpoint, that f serves and resets, to a worker
// whose loop does not run. It returns when the reset has come.
func newProbeLab(t *testing.T, says string, f func(*net.TCPConn)) *probeLab {
	t.Helper()
	loop := must.Get(poll.New())(t)
	t.Cleanup(loop.Stop)
	p := &probeLab{worker: New(Config{}).NewWorker(loop)}
	listener := must.Get(sys.ListenTCP(loopback, sys.ListenOptions{}))(t)
	defer sys.Close(listener)
	addr, _ := sys.LocalAddr(listener)
	c := must.Get(net.Dial("tcp", addr.String()))(t)
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	p.client = c.(*net.TCPConn)
	must.OK(t, must.Err(io.WriteString(c, says)))
	var errno sys.Errno
	wait.True(t, "the client's connection comes", func() bool { // it has one before its last packet has come
		p.clientFD, _, errno = sys.Accept(listener)
		return errno == 0
	})
	served := make(chan struct{})
	endpoint := backend(t, func(c *net.TCPConn) {
		f(c)
		close(served)
	})
	if p.upstream, errno = sys.ConnectTCP(endpoint, netip.AddrPort{}, sys.ConnectOptions{}); errno != 0 && errno != sys.EINPROGRESS {
		t.Fatal(errno)
	}
	<-served
	until(t, p.upstream, unix.POLLERR) // the reset has come
	if says != "" {
		until(t, p.clientFD, unix.POLLIN)
	}
	return p
}

// until waits for an event of a descriptor.
func until(t *testing.T, fd int, event int16) {
	t.Helper()
	wait.True(t, "an event", func() bool {
		fds := []unix.PollFd{{Fd: int32(fd), Events: event}}
		_, err := unix.Poll(fds, 0)
		return err == nil && fds[0].Revents&event != 0
	})
}

// An endpoint that says why it is too busy and resets the connection, before
// anybody has looked whether it is connected, is not one that failed to answer:
// the client gets what it said, and the reset.
func TestProbeDeliversWhatCameBeforeAReset(t *testing.T) {
	for _, says := range []string{"", "EHLO client\r\n"} {
		const banner = "421 too busy\r\n"
		p := newProbeLab(t, says, func(c *net.TCPConn) {
			_, _ = io.WriteString(c, banner)
			_ = c.SetLinger(0)
			_ = c.Close()
		})
		if e := p.worker.Probe(&p.link, p.clientFD, p.upstream); e != 0 {
			t.Errorf("client sent %q: Probe gives %v", says, e)
			continue
		}
		p.worker.Start(&p.link, Socket{FD: p.clientFD}, Socket{FD: p.upstream}, p)
		got, err := io.ReadAll(p.client)
		if string(got) != banner || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("client sent %q, and got %q, %v; want %q and a reset", says, got, err, banner)
		}
		if p.end != EndpointReset || p.link.BytesDown() != uint64(len(banner)) || p.link.FirstByte == 0 {
			t.Errorf("ended by %v after %d bytes, the first at %d", p.end, p.link.BytesDown(), p.link.FirstByte)
		}
		check.Equalf(t, p.worker.stats.Held, 0, "bytes are left")
	}
}

// One that resets the connection without a word has not answered: nothing is lost
// if another endpoint is tried.
func TestProbeOfAnEndpointThatResets(t *testing.T) {
	p := newProbeLab(t, "hello", func(c *net.TCPConn) {
		_ = c.SetLinger(0)
		_ = c.Close()
	})
	check.Equalf(t, p.worker.Probe(&p.link, p.clientFD, p.upstream), sys.ECONNRESET, "what Probe says")
	sys.Close(p.upstream)
	got := make(chan string, 1)
	other := backend(t, func(c *net.TCPConn) {
		b := make([]byte, 5)
		_, _ = io.ReadFull(c, b)
		got <- string(b)
	})
	p.upstream, _ = sys.ConnectTCP(other, netip.AddrPort{}, sys.ConnectOptions{})
	until(t, p.upstream, unix.POLLOUT)
	must.Equal(t, p.worker.Probe(&p.link, p.clientFD, p.upstream), 0)
	p.worker.Start(&p.link, Socket{FD: p.clientFD}, Socket{FD: p.upstream}, p)
	defer p.worker.Abort(&p.link, Shutdown)
	check.Equalf(t, <-got, "hello", "the other endpoint")
}
