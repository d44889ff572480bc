package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// movers are connections of all kinds that processes hand to each other.
type movers struct {
	lab     *netns.Lab
	p       *proxy
	talks   *talkServer
	joiner  *joiner
	slow    []pipe // the client reads nothing, and the endpoint has written what fits
	half    []pipe // the client has ended its half
	idle    []net.Conn
	dialled []net.Conn   // the endpoint does not answer yet
	silent  net.Listener // that endpoint
	count   atomic.Uint32
	visits  map[uint32]netip.AddrPort // the talks, by number; after they have ended
}

// talkSize is how many bytes a talk of movers sends each way, and heldSize how many the endpoint
// of a slow client sends.
const talkSize, heldSize = 300 << 10, 3 << 20

// TestPromise7_ConnectionsMove: relayed connections go from process to process in the middle of
// what they do: sending both ways, half-closed, with bytes that their client does not read, and
// while their endpoint is dialled. Every byte arrives once and in order, each end stays what it
// is, and each connection has one record, which tells the whole.
func TestPromise7_ConnectionsMove(t *testing.T) {
	bothWays(t, func(t *testing.T, splice string) { playMovers(t, splice) })
}

func playMovers(t *testing.T, splice string) {
	talkers, each, takeOvers := 16, 15, 3
	if full() {
		talkers, each, takeOvers = 1000, 100, 20
	}
	m := newMovers(t, splice, each)
	stop := make(chan struct{})
	var running sync.WaitGroup
	var mu sync.Mutex
	for i := range talkers {
		running.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				id := m.count.Add(1)
				client, err := m.talks.play(m.lab.Client, addresses(80, vip4, vip6)[i%2], id)
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				m.visits[id] = client
				mu.Unlock()
			}
		})
	}
	talked := func(more uint32) {
		from := m.count.Load()
		wait.For(t, "talks go on", talkTimeout, func() error {
			if !t.Failed() && m.count.Load() < from+more {
				return errNotYet
			}
			return nil
		})
	}
	for n := range takeOvers {
		talked(uint32(2 * talkers))
		before := m.p
		next := *before
		m.p = &next
		m.p.start(splice, "--datapath", "relay", "--take-over")
		before.awaitLog("another sluice has taken over")
		if n == 0 {
			m.answer(t)
		}
		before.waitExit() // everything is with the next one
		if code := before.cmd.ProcessState.ExitCode(); code != 0 {
			t.Errorf("after a take-over: %v, want exit status 0", before.cmd.ProcessState)
		}
	}
	talked(uint32(2 * talkers))
	close(stop)
	running.Wait()
	m.finish(t)
	m.p.awaitRecords(len(m.visits) + len(m.slow) + len(m.half) + len(m.idle) + len(m.dialled)) // all have ended
	m.p.stop()
	m.checkRecords(t)
}

// newMovers starts a proxy, and opens so many connections of each kind.
func newMovers(t *testing.T, splice string, each int) *movers {
	t.Helper()
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	m := &movers{lab: lab, talks: newTalkServer(talkSize), joiner: newJoiner(t, lab, b, 8081), visits: make(map[uint32]netip.AddrPort)}
	m.talks.listen(t, b, 8080)
	b.EchoTCP(t, 8083)
	m.silent = silentListener(t, b, 8082)
	web := webOn(lab)
	other := func(name, vip string, port uint16) webService {
		return webService{name: name, vips: []string{vip}, port: 80, endpoints: on(port, b)}
	}
	joined, silent, idle := other("joined", "10.96.0.21", 8081), other("silent", "10.96.0.22", 8082), other("idle", "10.96.0.23", 8083)
	m.p = startProxy(t, lab, []webService{web, joined, silent, idle}, splice, "--datapath", "relay")
	m.p.relayed = "the test moves what the relay carries"
	for range each {
		c := m.joiner.join(t, lab.Client, addresses(80, joined.vips...)[0])
		_ = c.server.SetDeadline(time.Now().Add(10 * talkTimeout))
		_ = c.client.SetDeadline(time.Now().Add(10 * talkTimeout))
		m.slow = append(m.slow, c)
		go func() { // finish sees what is missing
			_, _ = c.server.Write(noise()[:heldSize])
			_ = c.server.CloseWrite()
		}()
		h := m.joiner.join(t, lab.Client, addresses(80, joined.vips...)[0])
		transfer(t, h.client, h.server, "a question")
		if err := h.client.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		wantEnd(t, h.server)
		m.half = append(m.half, h)
	}
	m.idle = hold(t, lab.Client, addresses(80, idle.vips...)[0], each)
	for range each {
		c, err := lab.Client.Dial("tcp", addresses(80, silent.vips...)[0])
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		if _, err := io.WriteString(c, "early"); err != nil {
			t.Fatal(err)
		}
		m.dialled = append(m.dialled, c)
	}
	return m
}

// silentListener drops what arrives, until its filter is removed.
func silentListener(t *testing.T, h *netns.Host, port uint16) net.Listener {
	t.Helper()
	nothing := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	filter := unix.SockFprog{Len: 1, Filter: &nothing[0]}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		return errors.Join(c.Control(func(fd uintptr) {
			err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &filter)
		}), err)
	}}
	lc.SetMultipathTCP(false)
	l, err := h.ListenConfig(&lc, "tcp", fmt.Sprintf(":%d", port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// answer has the silent endpoint answer the next packet of each dial, and echo.
func (m *movers) answer(t *testing.T) {
	t.Helper()
	raw, err := m.silent.(*net.TCPListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	if err := raw.Control(func(fd uintptr) {
		failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
	}); errors.Join(err, failed) != nil {
		t.Fatal(err, failed)
	}
	go func() {
		for {
			c, err := m.silent.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue
			}
			go func() {
				defer c.Close()
				_, _ = io.Copy(c, c)
			}()
		}
	}()
}

// finish has all connections but the talks come to their end.
func (m *movers) finish(t *testing.T) {
	t.Helper()
	buf := make([]byte, 64<<10)
	for i, c := range m.slow {
		// The endpoint's TCP may wait for its next retransmission, the later the longer the client
		// has read nothing.
		_ = c.client.SetDeadline(time.Now().Add(10 * talkTimeout))
		if o := receive(c.client, noise()[:heldSize], buf); o.err != nil || o.got != heldSize {
			t.Errorf("slow client %d: %d of %d bytes, %v", i, o.got, heldSize, o.err)
		}
		_ = c.client.Close()
	}
	for i, c := range m.half {
		sent := noise()[1000*i:][:100_000]
		go func() {
			_, _ = c.server.Write(sent)
			_ = c.server.Close()
		}()
		_ = c.client.SetDeadline(time.Now().Add(talkTimeout))
		if o := receive(c.client, sent, buf); o.err != nil || o.got != len(sent) {
			t.Errorf("half-closed client %d: %d of %d bytes, %v", i, o.got, len(sent), o.err)
		}
		_ = c.client.Close()
	}
	alive(t, m.idle)
	for _, c := range m.idle {
		_ = c.Close()
	}
	for i, c := range m.dialled {
		_ = c.SetDeadline(time.Now().Add(talkTimeout))
		got := make([]byte, len("early"))
		if _, err := io.ReadFull(c, got); err != nil || string(got) != "early" {
			t.Errorf("client %d that was in the middle of a dial: %q, %v", i, got, err)
		}
		_ = c.Close()
	}
}

// checkRecords expects one record of each connection, with all bytes.
func (m *movers) checkRecords(t *testing.T) {
	t.Helper()
	records := m.p.records()
	of := make(map[[2]netip.AddrPort][]record) // a port may have served two talks
	for _, r := range records {
		k := [2]netip.AddrPort{r.Client, r.VIP}
		of[k] = append(of[k], r)
	}
	if want := len(m.visits) + len(m.slow) + len(m.half) + len(m.idle) + len(m.dialled); len(records) != want {
		t.Errorf("%d records of %d connections", len(records), want)
	}
	one := func(c net.Conn, up, down int, end string) {
		found := of[[2]netip.AddrPort{netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(c.RemoteAddr().String())}]
		if len(found) != 1 {
			t.Errorf("%s to %s has %d records", c.LocalAddr(), c.RemoteAddr(), len(found))
			return
		}
		r := found[0]
		if r.End != end || r.BytesUp != uint64(up) || r.BytesDown != uint64(down) || r.Attempts < 1 || r.ConnectUS == nil || r.FirstByteUS == nil || !r.SourceAddress.IsValid() {
			t.Errorf("the record says %+v, want %d bytes up, %d down, %s", r, up, down, end)
		}
	}
	for _, c := range m.slow {
		one(c.client, 0, heldSize, "endpoint_fin")
	}
	for _, c := range m.half {
		one(c.client, len("a question"), 100_000, "client_fin")
	}
	for _, c := range m.dialled {
		one(c, len("early"), len("early"), "client_fin")
	}
	for id, client := range m.visits {
		k := newTalk(id, talkSize)
		for _, vip := range addresses(80, vip4, vip6) {
			if found := of[[2]netip.AddrPort{client, netip.MustParseAddrPort(vip)}]; len(found) == 1 {
				if err := k.compare(found[0]); err != nil {
					t.Errorf("talk %d (ending %d): %v", id, k.ending, err)
				}
			}
		}
	}
}
