package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// talks is the number of connections in the byte-exactness tests. 10,000 with 1
// MiB each way take minutes.
func talks() int {
	switch {
	case full():
		return 10000
	case testing.Short():
		return 200
	}
	return 400
}

// TestPromise3_BytesArriveCompleteAndInOrder plays scripts with half-closes and
// resets at random places. Both sides know every byte. Afterwards the proxy must
// hold no resources of them.
func TestPromise3_BytesArriveCompleteAndInOrder(t *testing.T) { bothWays(t, playTalks) }

func playTalks(t *testing.T, splice string) {
	const size, clients, warmUp = 1 << 20, 64, 64
	lab := netns.NewLab(t, 3)
	s := newTalkServer(size)
	for _, b := range lab.Backends {
		s.listen(t, b, 8080)
	}
	p := startProxy(t, lab, []webService{webOn(lab)}, splice)
	targets := addresses(80, vip4, vip6)
	count := talks()
	play := func(first, n int) []visit {
		return crowd(n, clients, func(i int) visit {
			client, err := s.play(lab.Client, targets[i%2], uint32(first+i))
			return visit{client: client, err: err}
		})
	}
	failures := 0
	report := func(visits []visit) {
		for _, v := range visits {
			if v.err != nil {
				if failures++; failures <= 10 {
					t.Error(v.err)
				}
			}
		}
	}
	// The first connections create everything that the proxy creates once and
	// keeps.
	report(play(0, warmUp))
	before := p.settle(nil)
	start := time.Now()
	visits := play(warmUp, count)
	report(visits)
	took := time.Since(start)
	t.Logf("%d connections of %d bytes each way in %v, %d wrong", count, size, took, failures)
	after := p.settle(&before)
	t.Logf("before: %v, after: %v", before, after)
	p.stop()

	// Each talk's record must agree with its script.
	records := p.records()
	check.Equalf(t, len(records), warmUp+count, "records")
	// Ports are reused, so some talks have the same client address.
	byClient := map[netip.AddrPort][]record{}
	for _, r := range records {
		byClient[r.Client] = append(byClient[r.Client], r)
	}
	compared := 0
	for i, v := range visits {
		if of := byClient[v.client]; len(of) == 1 && v.err == nil {
			compared++
			k := newTalk(uint32(warmUp+i), size)
			check.OKf(t, k.compare(of[0]), "talk %d (ending %d)", k.id, k.ending)
		}
	}
	if compared < count/2 {
		t.Errorf("only %d of %d talks could be compared with their records", compared, count)
	}
}

// compare describes differences between the record and what it should say.
func (k *talk) compare(r record) error {
	ends := map[ending][]string{
		endTogether:    {"client_fin", "endpoint_fin"},
		endClientFirst: {"client_fin"},
		endServerFirst: {"endpoint_fin"},
		endClientReset: {"client_reset"},
		endServerReset: {"endpoint_reset"},
	}[k.ending]
	known := false
	for _, e := range ends {
		known = known || r.End == e
	}
	if !known {
		return fmt.Errorf("end is %s, want one of %v", r.End, ends)
	}
	if k.ending == endClientReset || k.ending == endServerReset {
		return nil // bytes that had not arrived at the reset did not count
	}
	if up, down := greetingUp+len(k.up), greetingDown+len(k.down); r.BytesUp != uint64(up) || r.BytesDown != uint64(down) {
		return fmt.Errorf("%d bytes up and %d down, want %d and %d", r.BytesUp, r.BytesDown, up, down)
	}
	return nil
}

// pipe is a connection through the proxy; the test holds both ends.
type pipe struct {
	client, server *net.TCPConn
}

// joiner makes pipes.
type joiner struct {
	lab      *netns.Lab
	dialer   net.Dialer
	accepted chan *net.TCPConn
}

// newJoiner replaces the server on the backend's port.
func newJoiner(t *testing.T, lab *netns.Lab, b *netns.Host, port uint16) *joiner {
	t.Helper()
	l := must.Get(b.Listen("tcp", fmt.Sprintf(":%d", port)))(t)
	j := &joiner{lab: lab, dialer: net.Dialer{Timeout: startTimeout}, accepted: make(chan *net.TCPConn)}
	done := make(chan struct{})
	t.Cleanup(func() { close(done); _ = l.Close() })
	go netns.Accept(l, func(c net.Conn) {
		select {
		case j.accepted <- c.(*net.TCPConn):
		case <-done:
			c.Close()
		}
	})
	return j
}

// join connects. Both ends are closed with the test.
func (j *joiner) join(t *testing.T, from *netns.Host, address string) pipe {
	t.Helper()
	c := must.Get(from.Dialer(&j.dialer, "tcp", address))(t)
	t.Cleanup(func() { _ = c.Close() })
	select {
	case s := <-j.accepted:
		t.Cleanup(func() { _ = s.Close() })
		for _, end := range []net.Conn{c, s} {
			_ = end.SetDeadline(time.Now().Add(talkTimeout))
		}
		return pipe{c.(*net.TCPConn), s}
	case <-time.After(startTimeout):
		t.Fatalf("%s: connected, but the endpoint got no connection", address)
	}
	return pipe{}
}

func transfer(t *testing.T, from, to net.Conn, text string) {
	t.Helper()
	for _, end := range []net.Conn{from, to} { // the test may have taken its time since they were joined
		_ = end.SetDeadline(time.Now().Add(talkTimeout))
	}
	must.OKf(t, must.Err(io.WriteString(from, text)), "write %q", text)
	got := make([]byte, len(text))
	if _, err := io.ReadFull(to, got); err != nil || string(got) != text {
		t.Fatalf("got %q, %v, want %q", got, err, text)
	}
}

func wantEnd(t *testing.T, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(stopTimeout))
	if n, err := c.Read(make([]byte, 1)); n != 0 || err != io.EOF {
		t.Fatalf("got %d bytes and %v, want the end of this half", n, err)
	}
}

// bothWays runs a test with splice and without.
func bothWays(t *testing.T, test func(t *testing.T, splice string)) {
	for _, splice := range []string{"--splice=auto", "--splice=off"} {
		t.Run(splice[2:], func(t *testing.T) { test(t, splice) })
	}
}

// TestPromise3_HalfCloseStaysAHalfClose ends one half in each direction and goes
// on sending in the other.
func TestPromise3_HalfCloseStaysAHalfClose(t *testing.T) {
	t.Parallel()
	bothWays(t, halfCloses)
}

func halfCloses(t *testing.T, splice string) {
	lab := netns.NewLab(t, 1)
	j := newJoiner(t, lab, lab.Backends[0], 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, splice)
	for _, address := range addresses(80, vip4, vip6) {
		for _, first := range []string{"client", "server"} {
			c := j.join(t, lab.Client, address)
			a, b := c.client, c.server
			if first == "server" {
				a, b = b, a
			}
			transfer(t, a, b, "before")
			transfer(t, b, a, "before")
			must.OK(t, a.CloseWrite())
			wantEnd(t, b)
			transfer(t, b, a, "after the other half ended")
			must.OK(t, b.CloseWrite())
			wantEnd(t, a)
		}
	}
	p.stop()
	want := []string{"client_fin", "endpoint_fin", "client_fin", "endpoint_fin"}
	p.wantEnds(t, want...)
}

// TestPromise3_ResetStaysAReset resets each side: while idle, with bytes in
// flight, and after the other half has ended.
func TestPromise3_ResetStaysAReset(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, splice string) { resets(t, splice, false) })
}

// TestMultipathClientsMeetResets is the same for clients that ask for Multipath
// TCP, and are answered by TCP. They must not take a reset for a lost path and
// wait for another path (net.mptcp.close_timeout, 60 s).
func TestMultipathClientsMeetResets(t *testing.T) {
	t.Parallel()
	bothWays(t, func(t *testing.T, splice string) { resets(t, splice, true) })
}

func resets(t *testing.T, splice string, multipath bool) {
	lab := netns.NewLab(t, 1)
	j := newJoiner(t, lab, lab.Backends[0], 8080)
	j.dialer.SetMultipathTCP(multipath)
	p := startProxy(t, lab, []webService{webOn(lab)}, splice)
	var want []string
	for _, address := range addresses(80, vip4, vip6) {
		for _, when := range []string{"at rest", "with bytes on the way", "half-closed"} {
			for _, who := range []string{"client_reset", "endpoint_reset"} {
				c := j.join(t, lab.Client, address)
				a, b := c.client, c.server
				if who == "endpoint_reset" {
					a, b = b, a
				}
				transfer(t, b, a, "before")
				switch when {
				case "with bytes on the way":
					must.OK(t, must.Err(a.Write(bytes.Repeat([]byte("x"), 1<<16))))
				case "half-closed":
					must.OK(t, b.CloseWrite())
					wantEnd(t, a)
				}
				_ = a.SetLinger(0)
				_ = a.Close()
				_ = b.SetDeadline(time.Now().Add(stopTimeout))
				if _, err := io.Copy(io.Discard, b); !isReset(err) {
					t.Errorf("%s, %s, %s: the other side saw %v, want a reset", address, who, when, err)
				}
				want = append(want, who)
			}
		}
	}
	p.stop()
	p.wantEnds(t, want...)
}

// TestPromise3_NothingIsLostBehindASlowReader fills every buffer on the path. The
// proxy must stop reading rather than buffer what it read.
func TestPromise3_NothingIsLostBehindASlowReader(t *testing.T) { bothWays(t, readSlowly) }

func readSlowly(t *testing.T, splice string) {
	const size, piece, keeps = 64 << 20, 64 << 10, 24 << 20
	lab := netns.NewLab(t, 1)
	j := newJoiner(t, lab, lab.Backends[0], 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, splice)
	c := j.join(t, lab.Client, addresses(80, vip4)[0])
	before := p.memory()

	at := func(i int) []byte { return noise()[i%len(noise()):][:piece] }
	var written atomic.Int64
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		for i := 0; i < size; i += piece {
			if _, err := c.server.Write(at(i)); err != nil {
				t.Errorf("write: %v", err)
				return
			}
			written.Store(int64(i + piece))
		}
		_ = c.server.CloseWrite()
	})
	defer c.server.Close() // ends the writer if the reader has failed
	last, since := int64(-1), time.Now()
	wait.For(t, "the writer has to wait", talkTimeout, func() error {
		if now := written.Load(); now != last {
			last, since = now, time.Now()
		}
		if time.Since(since) < 300*time.Millisecond {
			return errNotYet
		}
		return nil
	})
	if grown := p.memory() - before; grown > keeps || last == size {
		t.Errorf("with %d bytes on their way to a reader that does not read, the proxy has grown by %d bytes", last, grown)
	}
	got := 0
	buf := make([]byte, piece)
	for _, end := range []*net.TCPConn{c.client, c.server} {
		_ = end.SetDeadline(time.Now().Add(2 * talkTimeout))
	}
	for {
		n, err := c.client.Read(buf[:min(1+got%(3*piece), piece-got%piece)])
		if !bytes.Equal(buf[:n], at(got - got%piece)[got%piece:][:n]) {
			t.Fatalf("wrong bytes after %d", got)
		}
		got += n
		if err == io.EOF {
			break
		}
		must.OK(t, err)
	}
	check.Equalf(t, got, size, "bytes")
	_ = c.client.Close()
	p.stop()
}
