package e2e

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// movers are connections of all kinds that processes hand to each other.
type movers struct {
	lab     *netns.Lab
	p       *proxy
	flags   []string
	web     webService // of talks
	talks   *talkServer
	joiner  *joiner
	slow    []pipe // the client reads nothing, and the endpoint has written what fits
	half    []pipe // the client has ended its half
	idle    []net.Conn
	dialled []net.Conn // a take-over came in the middle of the dial
	silent  net.Listener
	count   atomic.Uint32
	mu      sync.Mutex
	visits  map[uint32][2]netip.AddrPort // client and destination of the talks, by number; guarded by mu
	stop    chan struct{}                // ends talks, and what is beside them
	running sync.WaitGroup
	quit    func() // ends them
	beside  int    // connections of others than these
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
	m := newMovers(t, mode{}, each, each, 0, splice, "--datapath", "relay")
	m.talk(t, talkers)
	for range takeOvers {
		m.takeOver(t, 2*talkers, each)
	}
	m.talked(t, 2*talkers)
	m.end(t)
	m.checkRecords(t)
}

// talk starts clients that talk all the time.
func (m *movers) talk(t *testing.T, talkers int) {
	to := m.web.destinations(m.lab)
	for i := range talkers {
		m.running.Go(func() {
			for {
				select {
				case <-m.stop:
					return
				default:
				}
				id := m.count.Add(1)
				client, err := m.talks.play(m.lab.Client, to[i%len(to)], id)
				if err != nil {
					t.Error(err)
					return
				}
				m.mu.Lock()
				m.visits[id] = [2]netip.AddrPort{client, netip.MustParseAddrPort(to[i%len(to)])}
				m.mu.Unlock()
			}
		})
	}
}

// talked waits until more talks have begun.
func (m *movers) talked(t *testing.T, more int) {
	t.Helper()
	from := m.count.Load()
	wait.For(t, "talks go on", talkTimeout, func() error {
		if !t.Failed() && m.count.Load() < from+uint32(more) {
			return errNotYet
		}
		return nil
	})
}

// takeOver starts the next process, which takes over, once more talks have begun, and in the middle
// of dials.
func (m *movers) takeOver(t *testing.T, talks, dials int) {
	t.Helper()
	m.talked(t, talks)
	connected := m.dial(t, dials)
	before := m.p
	next := *before
	if next.program == "" {
		next.program = os.Getenv("SLUICE_TEST_OTHER") // of another release
	} else {
		next.program = ""
	}
	m.p = &next
	m.p.start(append(slices.Clone(m.flags), "--take-over")...)
	before.awaitLog("another sluice has taken over")
	connected()
	before.waitExit() // everything is with the next one
	for _, c := range m.dialled[:len(m.dialled)-dials] {
		_ = c.Close() // it has been through another take-over
	}
	check.Equalf(t, before.cmd.ProcessState.ExitCode(), 0, "exit status after a take-over")
}

// end ends all clients, and then the proxy.
func (m *movers) end(t *testing.T) {
	t.Helper()
	m.quit()
	m.finish(t)
	if err := wait.Poll(stopTimeout, func() error {
		if n, want := len(m.records()), m.connections(); n < want {
			return fmt.Errorf("%d of %d", n, want)
		}
		return nil
	}); err != nil {
		t.Errorf("records of connections that have ended: %v", err)
	}
	m.p.stop()
}

// newMovers starts a proxy, and opens connections of each kind, and idle ones. Talks send a piece in
// each interval of pace, if it is not 0.
func newMovers(t *testing.T, mode mode, each, idlers int, pace time.Duration, flags ...string) *movers {
	t.Helper()
	lab := netns.NewLab(t, 2)
	b := lab.Backends[0]
	m := &movers{lab: lab, talks: newTalkServer(talkSize), joiner: newJoiner(t, lab, b, 8081), visits: make(map[uint32][2]netip.AddrPort), stop: make(chan struct{})}
	m.quit = sync.OnceFunc(func() {
		close(m.stop)
		m.running.Wait()
	})
	m.talks.pace = pace
	for _, each := range lab.Backends {
		m.talks.listen(t, each, 8080)
	}
	b.EchoTCP(t, 8083)
	m.silent = echoSilently(t, b, 8082)
	m.web = webOn(lab)
	m.web.nodePort = 30080
	other := func(name, vip string, port uint16) webService {
		return webService{name: name, vips: []string{vip}, port: 80, endpoints: on(port, b)}
	}
	joined, silent, idle := other("joined", "10.96.0.21", 8081), other("silent", silentAddress, 8082), other("idle", "10.96.0.23", 8083)
	m.p = prepareProxy(t, lab, []webService{m.web, joined, silent, idle})
	m.p.mode, m.p.relayed = mode, "the test moves what the relay carries"
	m.flags = flags
	m.p.start(flags...)
	t.Cleanup(m.quit) // before the proxy ends
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
		must.OK(t, h.client.CloseWrite())
		wantEnd(t, h.server)
		m.half = append(m.half, h)
	}
	m.idle = hold(t, lab.Client, addresses(80, idle.vips...)[0], idlers)
	return m
}

// silentAddress is that of the Service whose endpoint is silent at times, and mostSilent how long
// it is at most: a dial ends after 15 s.
const (
	silentAddress = "10.96.0.22"
	mostSilent    = 6 * time.Second
)

// dial has clients connect to an endpoint that is silent for now. connected has it answer, and
// waits until it has echoed what each client said.
func (m *movers) dial(t *testing.T, clients int) (connected func()) {
	t.Helper()
	m.mute(t, true)
	answer := sync.OnceFunc(func() { m.mute(t, false) })
	late := time.AfterFunc(mostSilent, answer)
	t.Cleanup(func() { late.Stop() })
	type result struct {
		conn net.Conn
		err  error
	}
	results := make(chan result, clients)
	var begun sync.WaitGroup
	for range clients {
		begun.Add(1)
		go func() {
			c, err := m.lab.Client.Dialer(&net.Dialer{Timeout: startTimeout}, "tcp", addresses(80, silentAddress)[0])
			begun.Done()
			if err == nil {
				_ = c.SetDeadline(time.Now().Add(talkTimeout))
				if _, err = io.WriteString(c, "early"); err == nil {
					got := make([]byte, len("early"))
					_, err = io.ReadFull(c, got)
				}
			}
			results <- result{c, err}
		}()
	}
	if !slices.Contains(m.flags, "kernel") { // else it is the client that dials the endpoint
		begun.Wait()
	}
	return func() {
		t.Helper()
		answer()
		for range clients {
			r := <-results
			if r.err != nil {
				t.Fatalf("a client in the middle of a dial: %v", r.err)
			}
			m.dialled = append(m.dialled, r.conn)
		}
	}
}

// echoSilently echoes at an endpoint that mute makes silent: it drops what arrives.
func echoSilently(t *testing.T, h *netns.Host, port uint16) net.Listener {
	t.Helper()
	lc := net.ListenConfig{}
	lc.SetMultipathTCP(false)
	l := must.Get(h.ListenConfig(&lc, "tcp", fmt.Sprintf(":%d", port)))(t)
	t.Cleanup(func() { _ = l.Close() })
	go netns.Accept(l, func(c net.Conn) {
		go func() {
			defer c.Close()
			_, _ = io.Copy(c, struct{ io.Reader }{c})
		}()
	})
	return l
}

func (m *movers) mute(t *testing.T, silent bool) {
	nothing := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	filter := unix.SockFprog{Len: 1, Filter: &nothing[0]}
	raw, err := m.silent.(*net.TCPListener).SyscallConn()
	if err == nil {
		var failed error
		err = raw.Control(func(fd uintptr) {
			if silent {
				failed = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &filter)
			} else {
				failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
			}
		})
		err = errors.Join(err, failed)
	}
	check.OK(t, err)
}

// finish brings all connections but the talks to their end.
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
		for _, end := range []net.Conn{c.client, c.server} {
			_ = end.SetDeadline(time.Now().Add(talkTimeout))
		}
		sent := noise()[1000*i:][:100_000]
		go func() {
			_, _ = c.server.Write(sent)
			_ = c.server.Close()
		}()
		if o := receive(c.client, sent, buf); o.err != nil || o.got != len(sent) {
			t.Errorf("half-closed client %d: %d of %d bytes, %v", i, o.got, len(sent), o.err)
		}
		_ = c.client.Close()
	}
	alive(t, m.idle)
	for _, c := range m.idle {
		_ = c.Close()
	}
	for _, c := range m.dialled {
		_ = c.Close()
	}
}

// records returns those of connections so far.
func (m *movers) records() []record {
	list, _ := readRecords(m.p.accessLog) // the last line may be half written
	return slices.DeleteFunc(list, func(r record) bool { return r.Protocol != "TCP" })
}

// connections counts those that have ended, once all have.
func (m *movers) connections() int {
	return len(m.visits) + len(m.slow) + len(m.half) + len(m.idle) + len(m.dialled) + m.beside
}

// checkRecords expects one record of each connection, with all bytes.
func (m *movers) checkRecords(t *testing.T) {
	t.Helper()
	records := m.records()
	of := make(map[[2]netip.AddrPort][]record) // a port may have served two talks
	for _, r := range records {
		k := [2]netip.AddrPort{r.Client, r.VIP}
		of[k] = append(of[k], r)
	}
	if n := m.connections(); len(records) != n {
		t.Errorf("%d records of %d connections", len(records), n)
	}
	one := func(c net.Conn, up, down int, end string) {
		k := [2]netip.AddrPort{netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(c.RemoteAddr().String())}
		if len(of[k]) == 0 {
			t.Errorf("%s to %s has no record", c.LocalAddr(), c.RemoteAddr())
			return
		}
		r := of[k][0]
		of[k] = of[k][1:]
		if r.End != end || r.BytesUp != uint64(up) || r.BytesDown != uint64(down) || r.Attempts < 1 || r.Path == "relay" && (r.ConnectUS == nil || r.FirstByteUS == nil || !r.SourceAddress.IsValid()) {
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
	for id, ends := range m.visits {
		k := newTalk(id, talkSize)
		switch found := of[ends]; len(found) {
		case 0:
			t.Errorf("talk %d (ending %d) of %s has no record", id, k.ending, ends[0])
		case 1:
			if err := k.compare(found[0]); err != nil {
				t.Errorf("talk %d (ending %d, cut %d): %v; %+v", id, k.ending, k.cut, err, found[0])
			}
		}
	}
}
