package relay

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// The benchmarks run clients, proxy and endpoints in one process over loopback:
// good for comparing one version with the next, and the relay with two goroutines
// and io.Copy for each connection. What the product does on a network is
// measured by test/bench.

// contender is one of the proxies that are compared.
type contender struct {
	name  string
	start func(b *testing.B, endpoint netip.AddrPort) (addr netip.AddrPort, stats func() (calls, bytes uint64))
}

var contenders = []contender{
	{"relay", startRelay(Config{Splice: true})},
	{"relay-nosplice", startRelay(Config{})},
	{"iocopy", startGoProxy},
}

func startRelay(config Config) func(*testing.B, netip.AddrPort) (netip.AddrPort, func() (uint64, uint64)) {
	return func(b *testing.B, endpoint netip.AddrPort) (netip.AddrPort, func() (uint64, uint64)) {
		loops := runtime.NumCPU()
		before := runtime.GOMAXPROCS(2 * poll.Procs(loops)) // the clients' and endpoints' share
		b.Cleanup(func() { runtime.GOMAXPROCS(before) })
		p := newProxy(b, loops, endpoint, config)
		return p.addr, func() (uint64, uint64) {
			s := p.stats()
			return s.SystemCalls() + p.waits(), s.Bytes
		}
	}
}

// startGoProxy runs the proxy that one writes in an afternoon.
func startGoProxy(b *testing.B, endpoint netip.AddrPort) (netip.AddrPort, func() (uint64, uint64)) {
	addr := backend(b, func(client *net.TCPConn) {
		server, err := net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(endpoint))
		if err != nil {
			b.Error(err)
			return
		}
		defer server.Close()
		var up sync.WaitGroup
		up.Go(func() {
			io.Copy(server, client)
			server.CloseWrite()
		})
		io.Copy(client, server)
		client.CloseWrite()
		up.Wait()
	})
	return addr, nil
}

func each(b *testing.B, serve func(*net.TCPConn), f func(b *testing.B, addr netip.AddrPort, calls func() uint64)) {
	for _, c := range contenders {
		b.Run("proxy="+c.name, func(b *testing.B) {
			addr, stats := c.start(b, backend(b, serve))
			f(b, addr, func() uint64 {
				if stats == nil {
					return 0
				}
				calls, _ := stats()
				return calls
			})
		})
	}
}

func dialBench(b *testing.B, addr netip.AddrPort) *net.TCPConn {
	return must.Get(net.DialTCP("tcp", nil, net.TCPAddrFromAddrPort(addr)))(b)
}

// BenchmarkBulk sends one stream from the client to the endpoint, in writes of
// the given size.
func BenchmarkBulk(b *testing.B) {
	for _, size := range []int{4 << 10, 128 << 10, 1 << 20} {
		b.Run(fmt.Sprintf("write=%dKiB", size>>10), func(b *testing.B) {
			received := make(chan int64, 1)
			drain := func(c *net.TCPConn) {
				buf := make([]byte, 1<<20)
				var total int64
				for {
					n, err := c.Read(buf)
					total += int64(n)
					if err != nil {
						received <- total
						return
					}
				}
			}
			each(b, drain, func(b *testing.B, addr netip.AddrPort, calls func() uint64) {
				c := dialBench(b, addr)
				buf := make([]byte, size)
				b.SetBytes(int64(size))
				before := calls()
				for b.Loop() {
					must.OK(b, must.Err(c.Write(buf)))
				}
				c.Close()
				if got := <-received; got != int64(b.N)*int64(size) {
					b.Fatalf("%d bytes of %d", got, b.N*size)
				}
				if n := calls() - before; n > 0 {
					b.ReportMetric(float64(n)/(float64(b.N)*float64(size)/1e6), "syscalls/MB")
				}
			})
		})
	}
}

// BenchmarkRequest exchanges requests and responses of 128 bytes on open
// connections.
func BenchmarkRequest(b *testing.B) {
	for _, clients := range []int{1, 64} {
		b.Run(fmt.Sprintf("clients=%d/size=128", clients), func(b *testing.B) {
			each(b, echo, func(b *testing.B, addr netip.AddrPort, calls func() uint64) {
				conns := make([]*net.TCPConn, clients)
				for i := range conns {
					conns[i] = dialBench(b, addr)
					defer conns[i].Close()
				}
				before := calls()
				share(b, clients, func(i, n int) {
					buf := make([]byte, 128)
					for range n {
						if err := exchange(conns[i], buf); err != nil {
							b.Error(err)
							return
						}
					}
				})
				perOp(b, calls()-before)
			})
		})
	}
}

// BenchmarkConnect connects, exchanges one request and response, and closes.
func BenchmarkConnect(b *testing.B) {
	const clients = 32
	b.Run(fmt.Sprintf("clients=%d/size=128", clients), func(b *testing.B) {
		each(b, echo, func(b *testing.B, addr netip.AddrPort, calls func() uint64) {
			before := calls()
			share(b, clients, func(_, n int) {
				buf := make([]byte, 128)
				for range n {
					c := dialBench(b, addr)
					check.OK(b, exchange(c, buf))
					c.SetLinger(0) // no TIME_WAIT at the client
					c.Close()
				}
			})
			perOp(b, calls()-before)
		})
	})
}

func exchange(c *net.TCPConn, buf []byte) error {
	if _, err := c.Write(buf); err != nil {
		return err
	}
	_, err := io.ReadFull(c, buf)
	return err
}

// share has so many clients do b.N operations together.
func share(b *testing.B, clients int, f func(i, n int)) {
	var wg sync.WaitGroup
	b.ResetTimer()
	for i := range clients {
		wg.Go(func() { f(i, (b.N+i)/clients) })
	}
	wg.Wait()
	b.StopTimer()
}

func perOp(b *testing.B, calls uint64) {
	if calls > 0 {
		b.ReportMetric(float64(calls)/float64(b.N), "syscalls/op")
	}
}

// BenchmarkIdleLink measures what an idle link takes of the heap, and what
// starting and ending it costs beside the system calls.
func BenchmarkIdleLink(b *testing.B) {
	f := must.Get(newNowhere())(b)
	defer f.Stop()
	r := New(Config{Splice: true, IdleTimeout: 1e12})
	r.kernel = f.kernel()
	w := r.newWorker(f)
	b.ReportAllocs()
	for b.Loop() {
		l := new(Link)
		w.Start(l, Socket{FD: 1}, Socket{FD: 2}, f)
		w.Abort(l, Idle)
	}
}

// BenchmarkHandle measures the relay's own part of a request and its response:
// everything but the system calls.
func BenchmarkHandle(b *testing.B) {
	f := must.Get(newNowhere())(b)
	defer f.Stop()
	r := New(Config{Splice: true, IdleTimeout: 1e12})
	r.kernel = f.kernel()
	r.kernel.recv = func(int, []byte) (int, sys.Errno) { return 128, 0 }
	w := r.newWorker(f)
	l := new(Link)
	w.Start(l, Socket{FD: 1}, Socket{FD: 2}, f)
	b.ReportAllocs()
	for b.Loop() {
		l.HandleEvents(client, poll.Readable)
		l.HandleEvents(endpoint, poll.Readable)
	}
	if l.BytesDown() < uint64(b.N)*128 {
		b.Fatalf("%d bytes", l.BytesDown())
	}
}
