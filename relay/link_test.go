package relay

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// eachMode runs a test with and without splice.
func eachMode(t *testing.T, f func(t *testing.T, config Config)) {
	for _, splice := range []bool{true, false} {
		t.Run(fmt.Sprintf("splice=%v", splice), func(t *testing.T) {
			noLeak(t)
			f(t, Config{Splice: splice, IdleTimeout: time.Minute})
		})
	}
}

// TestBytesExact: many connections at a time, any amount in any portions both
// ways, either side closing first; every byte is checked on both sides.
func TestBytesExact(t *testing.T) {
	eachMode(t, func(t *testing.T, config Config) {
		const clients, each = 16, 12
		sizes := []int{0, 1, 127, 4096, 65535, 65536, 65537, 300_000, 3_000_000}
		addr := backend(t, func(c *net.TCPConn) {
			// The first bytes say what is to follow; then both ways at once.
			var order [3]byte
			if _, err := io.ReadFull(c, order[:]); err != nil {
				t.Error(err)
				return
			}
			talk(t, c, rand.New(rand.NewPCG(uint64(order[2]), 1)), endpoint, sizes[order[1]], sizes[order[0]])
		})
		p := newProxy(t, 2, addr, config)
		var wg sync.WaitGroup
		for i := range clients {
			wg.Go(func() {
				rng := rand.New(rand.NewPCG(uint64(i), 2))
				for range each {
					c := p.dial()
					up, down := rng.IntN(len(sizes)), rng.IntN(len(sizes))
					check.OK(t, must.Err(c.Write([]byte{byte(up), byte(down), byte(rng.Uint32())})))
					talk(t, c, rng, client, sizes[up], sizes[down])
					c.Close()
				}
			})
		}
		wg.Wait()
		for range clients * each {
			if e := p.end(); e.end != ClientFin && e.end != EndpointFin {
				t.Errorf("ended by %v", e.end)
			}
		}
		if s := p.stats(); (s.Spliced > 0) != config.Splice {
			t.Errorf("%d bytes spliced", s.Spliced)
		}
	})
}

// talk sends so much and receives so much at the same time, half-closes when
// everything is sent, and checks every byte.
func talk(t testing.TB, c *net.TCPConn, rng *rand.Rand, side, send, receive int) {
	var wg sync.WaitGroup
	wg.Go(func() {
		buf := make([]byte, 100_000)
		for sent := 0; sent < send; {
			n := min(1+rng.IntN(len(buf)), send-sent)
			streamAt(buf[:n], side, sent)
			if _, err := c.Write(buf[:n]); err != nil {
				t.Errorf("side %d: after %d of %d bytes: %v", side, sent, send, err)
				return
			}
			sent += n
		}
		check.OKf(t, c.CloseWrite(), "side %d", side)
	})
	buf := make([]byte, 50_000)
	got := 0
	for {
		n, err := c.Read(buf)
		if !isStreamAt(buf[:n], 1-side, got) {
			t.Errorf("side %d: wrong bytes from %d on", side, got)
			break
		}
		got += n
		if err != nil {
			if err != io.EOF || got != receive {
				t.Errorf("side %d: %d of %d bytes, then %v", side, got, receive, err)
			}
			break
		}
	}
	wg.Wait()
}

// TestHalfClose: each side may close first and still gets the other's answer.
func TestHalfClose(t *testing.T) {
	eachMode(t, func(t *testing.T, config Config) {
		addr, conns := handover(t)
		p := newProxy(t, 1, addr, config)
		for first, want := range []End{ClientFin, EndpointFin} {
			c := p.dial()
			c.Write([]byte("hello"))
			e := <-conns
			a, b := c, e
			if first == endpoint {
				a, b = e, c
			}
			io.ReadFull(e, make([]byte, 5))
			a.CloseWrite()
			if rest, err := io.ReadAll(b); err != nil || len(rest) != 0 {
				t.Fatalf("%q, %v", rest, err)
			}
			answer := bytes.Repeat([]byte("answer"), 100_000)
			go func() {
				b.Write(answer)
				b.CloseWrite()
			}()
			if got, err := io.ReadAll(a); err != nil || !bytes.Equal(got, answer) {
				t.Fatalf("%d bytes, %v", len(got), err)
			}
			must.Equalf(t, p.end().end, want, "ended by")
		}
	})
}

// TestReset: a reset of one side is one for the other, after the bytes that
// came before it.
func TestReset(t *testing.T) {
	eachMode(t, func(t *testing.T, config Config) {
		addr, conns := handover(t)
		p := newProxy(t, 1, addr, config)
		for _, size := range []int{0, 5, 200_000} {
			for side, want := range []End{ClientReset, EndpointReset} {
				c := p.dial()
				c.Write([]byte("hello"))
				e := <-conns
				io.ReadFull(e, make([]byte, 5))
				a, b := c, e
				if side == endpoint {
					a, b = e, c
				}
				a.Write(make([]byte, size))
				if size < 10 {
					acknowledged(t, a) // else the reset may overtake them
				}
				a.SetLinger(0)
				a.Close()
				got, err := io.ReadAll(b)
				if !errors.Is(err, syscall.ECONNRESET) {
					t.Fatalf("side %d was reset, the other got %v", side, err)
				}
				// The sender's reset may overtake what it had not sent yet.
				if len(got) > size || size < 10 && len(got) != size {
					t.Fatalf("%d bytes of %d before the reset", len(got), size)
				}
				if got := p.end(); got.end != want {
					t.Fatalf("%+v, want %v", got, want)
				}
				b.Close()
			}
		}
	})
}

// acknowledged waits until the other side's kernel has all that was written.
func acknowledged(t *testing.T, c *net.TCPConn) {
	t.Helper()
	raw, err := c.SyscallConn()
	must.OK(t, err)
	wait.True(t, "all bytes are acknowledged", func() bool {
		left := -1
		if e := raw.Control(func(fd uintptr) { left, err = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) }); e != nil || err != nil {
			t.Fatal(e, err)
		}
		return left == 0
	})
}

// TestClosedWhileSending: a client that goes away in the middle of an answer
// resets the endpoint.
func TestClosedWhileSending(t *testing.T) {
	eachMode(t, func(t *testing.T, config Config) {
		failed := make(chan error, 1)
		addr := backend(t, func(c *net.TCPConn) {
			for {
				if _, err := c.Write(make([]byte, 1<<20)); err != nil {
					failed <- err
					return
				}
			}
		})
		p := newProxy(t, 1, addr, config)
		c := p.dial()
		io.ReadFull(c, make([]byte, 3<<20))
		c.Close() // with unread bytes: a reset
		if err := <-failed; !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Fatal(err)
		}
		if got := p.end(); got.end != ClientReset {
			t.Fatal(got)
		}
	})
}

// TestEndpointSpeaksFirst: nothing waits for the client's first byte.
func TestEndpointSpeaksFirst(t *testing.T) {
	eachMode(t, func(t *testing.T, config Config) {
		addr := backend(t, func(c *net.TCPConn) { c.Write([]byte("220 ready\r\n")) })
		p := newProxy(t, 1, addr, config)
		if got, err := io.ReadAll(p.dial()); err != nil || string(got) != "220 ready\r\n" {
			t.Fatalf("%q, %v", got, err)
		}
	})
}

// TestUrgentByte: it comes through in its place, as one more byte.
func TestUrgentByte(t *testing.T) {
	eachMode(t, func(t *testing.T, config Config) {
		addr, conns := handover(t)
		p := newProxy(t, 1, addr, config)
		c := p.dial()
		var want []byte
		for i := range 200 {
			part := bytes.Repeat([]byte{byte(i)}, 1+i*100)
			want = append(want, part...)
			flags := 0
			if i%20 == 7 {
				flags = unix.MSG_OOB
			}
			raw, err := c.SyscallConn()
			must.OK(t, err)
			for len(part) > 0 {
				var n int
				raw.Write(func(fd uintptr) bool {
					n, err = unix.SendmsgN(int(fd), part, nil, nil, flags)
					return err != unix.EAGAIN
				})
				must.OK(t, err)
				part = part[n:]
			}
		}
		c.CloseWrite()
		if got, err := io.ReadAll(<-conns); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%d bytes of %d, %v", len(got), len(want), err)
		}
	})
}

// TestUrgentByteBeforeTheEnd: a side sends bulk, an urgent byte, perhaps more, and
// closes at once, so that the FIN has arrived before the relay is at the urgent
// byte. The other side gets every byte.
func TestUrgentByteBeforeTheEnd(t *testing.T) {
	eachMode(t, func(t *testing.T, config Config) {
		const rounds, bulk = 60, 600_000
		addr, conns := handover(t)
		p := newProxy(t, 1, addr, config)
		for round := range rounds {
			from, to := p.dial(), <-conns
			if round%2 == 1 {
				from, to = to, from
			}
			after := []int{0, 1, 200_000}[round%3]
			var got []byte
			var err error
			var wg sync.WaitGroup
			wg.Go(func() { got, err = io.ReadAll(to) })
			want := make([]byte, bulk+1+after)
			streamAt(want, client, 0)
			from.Write(want[:bulk])
			raw, _ := from.SyscallConn()
			raw.Write(func(fd uintptr) bool {
				return unix.Sendto(int(fd), want[bulk:bulk+1], unix.MSG_OOB, nil) != unix.EAGAIN
			})
			from.Write(want[bulk+1:])
			from.CloseWrite()
			wg.Wait()
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("round %d, %d bytes after the urgent one: got %d bytes of %d, %v", round, after, len(got), len(want), err)
			}
			from.Close()
			to.Close()
		}
	})
}

// TestSlowReader: a fast writer and a reader that takes its time. What the
// relay holds stays within its bound, and nothing is lost.
func TestSlowReader(t *testing.T) {
	eachMode(t, func(t *testing.T, config Config) {
		const total, links = 24 << 20, 8
		config.MaxPipes = 4 // fewer than slow readers: the others copy
		config.PipeSize = 256 << 10
		addr := backend(t, func(c *net.TCPConn) {
			buf := make([]byte, 128<<10)
			for sent := 0; sent < total; sent += len(buf) {
				streamAt(buf, endpoint, sent)
				if _, err := c.Write(buf); err != nil {
					t.Error(err)
					return
				}
			}
		})
		p := newProxy(t, 2, addr, config)
		var wg sync.WaitGroup
		for range links {
			wg.Go(func() {
				c := p.dial()
				c.SetReadBuffer(64 << 10)
				buf := make([]byte, 40_000)
				got := 0
				for {
					n, err := c.Read(buf)
					if !isStreamAt(buf[:n], endpoint, got) {
						t.Errorf("wrong bytes from %d on", got)
						return
					}
					got += n
					if err != nil {
						if err != io.EOF || got != total {
							t.Errorf("%d of %d bytes, then %v", got, total, err)
						}
						return
					}
					if got%7 == 0 {
						if s := p.stats(); s.Held > links*bufferSize || p.relay.Pipes() > 4 {
							t.Errorf("%d bytes held, %d pipes", s.Held, p.relay.Pipes())
							return
						}
					}
				}
			})
		}
		wg.Wait()
	})
}

// TestRefusedEndpoint: what the client sent before the endpoint refused is given
// up with it.
func TestRefusedEndpoint(t *testing.T) {
	noLeak(t)
	// Not an address that tests listen on: a port that was just given back
	// could be the proxy's own next.
	nobody := netip.MustParseAddrPort("127.0.0.83:9")
	p := newProxy(t, 1, nobody, Config{})
	p.dialReset()
	// The client may hear of it before it is counted.
	for deadline := time.Now().Add(10 * time.Second); p.refused.Load() != 1; runtime.Gosched() {
		if time.Now().After(deadline) {
			t.Fatal("not refused")
		}
	}
}

// TestIdleLinks: a link that has moved bulk and is quiet now holds two
// descriptors, no pipe and no buffer.
func TestIdleLinks(t *testing.T) {
	noLeak(t)
	const links, size = 500, 300_000
	p := newProxy(t, 2, backend(t, echo), Config{Splice: true})
	before := openFiles(t)
	var wg sync.WaitGroup
	for range 10 {
		wg.Go(func() {
			buf := make([]byte, size)
			for range links / 10 {
				c := p.dial()
				go c.Write(make([]byte, size))
				check.OK(t, must.Err(io.ReadFull(c, buf)))
			}
		})
	}
	wg.Wait()
	s := p.stats()
	// Each link has two descriptors here and two at its peers.
	check.Equalf(t, openFiles(t)-before-2*p.relay.Pipes(), 4*links, "descriptors for %d links", links)
	if s.Held != 0 || s.Open != links || s.Spliced == 0 || p.relay.Pipes() > 2*pipesKept {
		t.Errorf("%+v, %d pipes", s, p.relay.Pipes())
	}
}

// TestIdleMemory: what ten thousand idle links take of the heap.
func TestIdleMemory(t *testing.T) {
	const links = 10_000
	f := must.Get(newNowhere())(t)
	defer f.Stop()
	r := New(Config{Splice: true, IdleTimeout: time.Hour})
	r.kernel = f.kernel()
	w := r.newWorker(f)
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	list := make([]*Link, links)
	for i := range list {
		list[i] = new(Link)
		w.Start(list[i], Socket{FD: 2 * i}, Socket{FD: 2*i + 1}, f)
	}
	each := int(heap()-before) / links
	t.Logf("%d bytes for each idle link", each)
	if each > 400 {
		t.Errorf("%d bytes for each idle link", each)
	}
	runtime.KeepAlive(list)
}
