package e2e

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// numbered are UDP sessions whose datagrams have numbers, both ways.
type numbered struct {
	lab      *netns.Lab
	p        *proxy
	sessions []*numberedSession
	stop     chan struct{}
	running  sync.WaitGroup

	mu   sync.Mutex
	seen map[uint32]*numberedPeer // what endpoints have received; guarded by mu
	errs []error                  // guarded by mu
}

func (n *numbered) fail(format string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.errs = append(n.errs, fmt.Errorf(format, args...))
}

func (n *numbered) failed() error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return errors.Join(n.errs...)
}

// numberedSession is a client. It has few datagrams on the way, so that no queue overflows.
type numberedSession struct {
	conn   net.Conn
	id     uint32
	window uint32 // datagrams on the way at most
	pause  time.Duration
	got    atomic.Uint32
}

// numberedPeer is a session as an endpoint sees it.
type numberedPeer struct {
	endpoint string
	client   netip.AddrPort
	came     numbers
}

// numbers are those of the datagrams that have come. Each is to come once; the kernel reorders
// some that threads send from several CPUs.
type numbers struct {
	all   uint32 // all up to this one
	ahead uint64 // the next but one, and so on
}

func (n *numbers) take(number uint32) error {
	switch at := number - n.all - 1; {
	case number <= n.all || at > 0 && at <= 64 && n.ahead>>(at-1)&1 != 0:
		return fmt.Errorf("datagram %d comes again", number)
	case at > 64:
		return fmt.Errorf("datagram %d comes after %d", number, n.all)
	case at > 0:
		n.ahead |= 1 << (at - 1)
	default:
		for next := uint64(1); next != 0; n.ahead >>= 1 {
			n.all, next = n.all+1, n.ahead&1
		}
	}
	return nil
}

// TestPromise7_SessionsMove: UDP sessions go from process to process while datagrams come and go.
// Each datagram arrives once, both ways; each session keeps its endpoint and its
// address there, and has one record that counts everything.
func TestPromise7_SessionsMove(t *testing.T) {
	t.Run("many", func(t *testing.T) { playNumbered(t, modes[0], 1000) })
	t.Run("modes", func(t *testing.T) {
		forModes(t, func(t *testing.T, m mode) { playNumbered(t, m, 100) })
	})
}

// movesRelayed are flags for the relay, with room for all sessions.
var movesRelayed = []string{"--datapath", "relay", "--max-udp-sessions", "2000"}

// playNumbered plays again if datagrams are lost while the kernel drops packets that wait for a CPU, of
// whichever test, on a machine whose backlog is short.
func playNumbered(t *testing.T, m mode, sessions int) {
	t.Helper()
	strict := netns.LongBacklog(t)
	for range 3 {
		before := netns.Dropped(t)
		err := playNumberedOnce(t, m, sessions)
		dropped := netns.Dropped(t) - before
		switch {
		case err == nil:
			return
		case strict || dropped == 0:
			t.Fatalf("%v; the kernel has dropped %d packets", err, dropped)
		}
		t.Logf("the kernel has dropped %d packets meanwhile: %v", dropped, err)
	}
	t.Error("datagrams were lost each time")
}

func playNumberedOnce(t *testing.T, m mode, sessions int) error {
	t.Helper()
	takeOvers := 3
	if full() {
		takeOvers = 20
	}
	n := newNumbered(t, m, sessions)
	for range takeOvers {
		n.progress(t)
		before := n.p
		next := *before
		n.p = &next
		n.p.start(append([]string{"--take-over"}, movesRelayed...)...)
		before.awaitLog("another sluice has taken over")
		before.waitExit() // all sessions are with the next one
	}
	n.progress(t)
	n.end()
	n.p.stop()
	if n.failed() == nil {
		n.checkRecords(n.p.records())
	}
	return n.failed()
}

func newNumbered(t *testing.T, m mode, sessions int) *numbered {
	t.Helper()
	lab := netns.NewLab(t, 4)
	n := &numbered{lab: lab, stop: make(chan struct{}), seen: make(map[uint32]*numberedPeer)}
	t.Cleanup(n.end)
	n.serve(t, 8080)
	dns := webOn(lab)
	dns.nodePort, dns.protocol = 30053, "UDP"
	n.p = prepareProxy(t, lab, []webService{dns})
	n.p.mode, n.p.relayed = m, "the test moves what the relay carries"
	n.p.start(movesRelayed...)
	n.open(t, dns.destinations(lab), sessions)
	return n
}

// open begins sessions, the first few of them busy.
func (n *numbered) open(t *testing.T, targets []string, sessions int) {
	t.Helper()
	for i := range sessions {
		c := must.Get(n.lab.Client.Dial("udp", targets[i%len(targets)]))(t)
		s := &numberedSession{conn: c, id: uint32(i), window: 1, pause: time.Duration(sessions) * time.Millisecond / 3}
		if i < 2*len(targets) {
			s.window, s.pause = 8, 3*time.Millisecond
		}
		n.sessions = append(n.sessions, s)
		n.running.Go(func() {
			if err := s.run(n.stop); err != nil {
				n.fail("%s to %s: %w", c.LocalAddr(), c.RemoteAddr(), err)
			}
		})
	}
}

// run sends datagrams and awaits those that come back, until stop. Then it awaits those on the
// way.
func (s *numberedSession) run(stop <-chan struct{}) error {
	sent, got, came := uint32(0), uint32(0), numbers{}
	p := make([]byte, 8)
	for stopped := false; ; {
		for ; !stopped && sent < got+s.window; sent++ {
			binary.BigEndian.PutUint32(p, s.id)
			binary.BigEndian.PutUint32(p[4:], sent+1)
			if _, err := s.conn.Write(p); err != nil {
				return err
			}
		}
		if got == sent {
			return nil
		}
		_ = s.conn.SetReadDeadline(time.Now().Add(startTimeout))
		if _, err := s.conn.Read(p); err != nil {
			return fmt.Errorf("after %d of %d datagrams: %w", got, sent, err)
		}
		if err := came.take(binary.BigEndian.Uint32(p[4:])); err != nil {
			return err
		}
		got++
		s.got.Store(got)
		select {
		case <-stop:
			stopped = true
		case <-time.After(s.pause):
		}
	}
}

// serve echoes datagrams at all endpoints, and checks that each comes once, a session's from one
// address.
func (n *numbered) serve(t *testing.T, port uint16) {
	t.Helper()
	for _, b := range n.lab.Backends {
		for _, address := range addresses(port, b.IPv4.String(), b.IPv6.String()) {
			n.serveAt(t, b, address)
		}
	}
}

func (n *numbered) serveAt(t *testing.T, h *netns.Host, address string) {
	t.Helper()
	pc := must.Get(h.ListenPacket("udp", address))(t)
	t.Cleanup(func() { _ = pc.Close() })
	netns.LongQueue(pc)
	go func() {
		p := make([]byte, 64)
		for {
			size, from, err := pc.(*net.UDPConn).ReadFromUDPAddrPort(p)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil || size != 8 {
				continue
			}
			if err := n.note(address, from, binary.BigEndian.Uint32(p), binary.BigEndian.Uint32(p[4:])); err != nil {
				n.fail("endpoint %s: %w", address, err)
			}
			_, _ = pc.(*net.UDPConn).WriteToUDPAddrPort(p[:size], from)
		}
	}()
}

func (n *numbered) note(endpoint string, from netip.AddrPort, id, number uint32) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	peer := n.seen[id]
	if peer == nil {
		peer = &numberedPeer{endpoint: endpoint, client: from}
		n.seen[id] = peer
	}
	if peer.endpoint != endpoint || peer.client != from {
		return fmt.Errorf("session %d comes from %v, before from %v to %s", id, from, peer.client, peer.endpoint)
	}
	return peer.came.take(number)
}

// progress waits until each session has got further datagrams.
func (n *numbered) progress(t *testing.T) {
	t.Helper()
	at := make([]uint32, len(n.sessions))
	for i, s := range n.sessions {
		at[i] = s.got.Load()
	}
	wait.For(t, "all sessions go on", startTimeout, func() error {
		for i, s := range n.sessions {
			if s.got.Load() < at[i]+2 && n.failed() == nil {
				return fmt.Errorf("session %d has got %d datagrams", i, s.got.Load()-at[i])
			}
		}
		return nil
	})
}

// end ends the clients.
func (n *numbered) end() {
	select {
	case <-n.stop:
	default:
		close(n.stop)
	}
	n.running.Wait()
}

// checkRecords expects one record of each session, with all datagrams.
func (n *numbered) checkRecords(records []record) {
	if len(records) != len(n.sessions) {
		n.fail("%d records of %d sessions", len(records), len(n.sessions))
	}
	of := make(map[[2]string]record)
	for _, r := range records {
		of[[2]string{r.Client.String(), r.VIP.String()}] = r
	}
	for _, s := range n.sessions {
		r := of[[2]string{s.conn.LocalAddr().String(), s.conn.RemoteAddr().String()}]
		n.mu.Lock()
		peer := n.seen[s.id]
		n.mu.Unlock()
		if bytes := uint64(8 * s.got.Load()); r.BytesUp != bytes || r.BytesDown != bytes || r.Attempts != 1 || r.Path == "relay" && r.FirstByteUS == nil || r.Endpoint.String() != peer.endpoint {
			n.fail("session %d: %+v, want %d bytes each way, and %s", s.id, r, bytes, peer.endpoint)
		}
		_ = s.conn.Close()
	}
}
