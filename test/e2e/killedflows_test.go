package e2e

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
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

// talker sends lines by one connection and checks that they come back, until stop.
type talker struct {
	conn  net.Conn
	pause time.Duration // between lines
	done  atomic.Uint64
}

func (k *talker) run(stop <-chan struct{}) error {
	r := bufio.NewReader(k.conn)
	if _, err := r.ReadString('\n'); err != nil { // the server's name
		return err
	}
	for i := 0; ; i++ {
		select {
		case <-stop:
			return nil
		case <-time.After(k.pause):
		}
		line := fmt.Sprintf("line %d\n", i)
		if err := k.conn.SetDeadline(time.Now().Add(startTimeout)); err != nil {
			return err
		}
		if _, err := io.WriteString(k.conn, line); err != nil {
			return fmt.Errorf("line %d: %w", i, err)
		}
		if got, err := r.ReadString('\n'); err != nil || got != line {
			return fmt.Errorf("line %d came back as %q: %w", i, got, err)
		}
		k.done.Add(1)
	}
}

// arrivals makes new connections at a rate, whether or not earlier ones have been
// answered. Each asks once, and checks the answer.
type arrivals struct {
	mu   sync.Mutex
	list []arrival // guarded by mu

	served  atomic.Int64
	stop    chan struct{}
	running sync.WaitGroup
}

type arrival struct {
	client     netip.AddrPort
	began, end time.Time
	err        error // nil if it was served
}

// arrive begins to connect from a host to an IPv4 address, until the returned arrivals are
// stopped.
func arrive(t *testing.T, from *netns.Host, to netip.AddrPort, perSecond int) *arrivals {
	t.Helper()
	for key, value := range map[string]string{"net/ipv4/tcp_tw_reuse": "1", "net/ipv4/ip_local_port_range": "1024 65535"} {
		must.OK(t, from.SetSysctl(key, value))
	}
	a := &arrivals{stop: make(chan struct{})}
	a.running.Go(func() {
		err := from.Do(func() error {
			tick := time.NewTicker(time.Second / time.Duration(perSecond))
			defer tick.Stop()
			for {
				select {
				case <-a.stop:
					return nil
				case <-tick.C:
				}
				conn, err := begin(to)
				if err != nil {
					return err
				}
				a.running.Go(func() { a.ask(conn) })
			}
		})
		check.OK(t, err)
	})
	return a
}

// begin sends a SYN and does not wait for the answer.
func begin(to netip.AddrPort) (net.Conn, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "")
	defer f.Close()
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}); !errors.Is(err, unix.EINPROGRESS) {
		return nil, fmt.Errorf("connect: %w", err)
	}
	return net.FileConn(f)
}

// ask plays one connection.
func (a *arrivals) ask(c net.Conn) {
	x := arrival{began: time.Now()}
	defer func() {
		_ = c.Close()
		x.end = time.Now()
		a.mu.Lock()
		a.list = append(a.list, x)
		a.mu.Unlock()
	}()
	x.client = c.LocalAddr().(*net.TCPAddr).AddrPort()
	_ = c.SetDeadline(x.began.Add(startTimeout))
	r := bufio.NewReader(c)
	name, err := r.ReadString('\n')
	if err != nil {
		x.err = err
		return
	}
	question := "who " + x.client.String() + "\n"
	if _, x.err = io.WriteString(c, question); x.err != nil {
		return
	}
	answer, err := r.ReadString('\n')
	if x.err = err; err == nil && (answer != question || !strings.HasPrefix(name, "b")) {
		x.err = fmt.Errorf("%q and %q answered %q", name, answer, question)
	}
	if x.err == nil {
		a.served.Add(1)
	}
}

// end stops, and returns all that came.
func (a *arrivals) end() []arrival {
	close(a.stop)
	a.running.Wait()
	return a.list
}

// refusal reports whether nobody served a connection: no byte was wrong or missing.
func (x *arrival) refusal() bool {
	return errors.Is(x.err, unix.ECONNREFUSED) || errors.Is(x.err, unix.ECONNRESET) || errors.Is(x.err, os.ErrDeadlineExceeded)
}

// TestPromise7_KilledProxyCutsNoForwardedConnection kills and restarts the proxy under
// busy connections and UDP sessions that the kernel forwards, while new ones come.
func TestPromise7_KilledProxyCutsNoForwardedConnection(t *testing.T) {
	// Without pauses, clients leave the starting proxy too little CPU.
	connections, sessions, kills, perSecond, pause := 40, 20, 4, 100, 10*time.Millisecond
	if full() {
		connections, sessions, kills, perSecond, pause = 500, 500, 20, 1000, 50*time.Millisecond
	}
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	lab.EchoUDP(t, 8080)
	const newcomers = "10.96.0.80"
	p := prepareProxy(t, lab, []webService{webOn(lab), {name: "new", vips: []string{newcomers}, port: 80, endpoints: on(8080, lab.Backends...)[:2]}})
	p.write("dns.yaml", strings.NewReplacer("protocol: TCP", "protocol: UDP", "name: web", "name: dns").Replace(
		webService{name: "web", vips: []string{"10.96.0.53"}, port: 80, endpoints: on(8080, lab.Backends[0])[:1]}.yaml()))
	p.start("--datapath", "kernel")

	stop := make(chan struct{})
	var running sync.WaitGroup
	end := sync.OnceFunc(func() {
		close(stop)
		running.Wait()
	})
	defer end() // before connections are closed
	var talkers []*talker
	var clients []string
	for range connections {
		c := lab.Client.Connect(t, "tcp", addresses(80, vip4)[0])
		k := &talker{conn: c, pause: pause}
		talkers, clients = append(talkers, k), append(clients, c.LocalAddr().String())
		running.Go(func() {
			check.OKf(t, k.run(stop), "%s", c.LocalAddr())
		})
	}
	var udp []net.Conn
	for range sessions {
		c := lab.Client.Connect(t, "udp", "10.96.0.53:80")
		udp = append(udp, c)
	}
	ask := func() {
		t.Helper()
		b := make([]byte, 64)
		for _, c := range udp {
			_ = c.SetDeadline(time.Now().Add(startTimeout))
			check.OK(t, must.Err(io.WriteString(c, "who")))
			if n, err := c.Read(b); err != nil || !strings.HasSuffix(string(b[:n]), "who") {
				t.Errorf("%q, %v", b[:n], err)
			}
		}
	}
	progress := func() {
		t.Helper()
		from := make([]uint64, len(talkers))
		for i, k := range talkers {
			from[i] = k.done.Load()
		}
		for i, k := range talkers {
			wait.For(t, "a connection goes on", startTimeout, func() error {
				if t.Failed() {
					return nil
				}
				if k.done.Load() < from[i]+3 {
					return fmt.Errorf("it has sent %d lines since %d", k.done.Load(), from[i])
				}
				return nil
			})
		}
	}
	ask()
	arriving := arrive(t, lab.Client, netip.AddrPortFrom(netip.MustParseAddr(newcomers), 80), perSecond)
	lost := kills * perSecond / 10 // a killed process loses the records of the last moment
	var away [][2]time.Time        // when nobody decided
	for range kills {
		progress()
		ask() // no session is idle
		served := int(arriving.served.Load())
		wait.For(t, "the log keeps up", startTimeout, func() error {
			list, err := readRecords(p.accessLog)
			n := 0
			for _, r := range list {
				if r.Service == "default/new:http" {
					n++
				}
			}
			if err == nil && n < served-lost {
				err = fmt.Errorf("%d records of %d connections", n, served)
			}
			return err
		})
		away = append(away, [2]time.Time{time.Now()})
		p.kill()
		progress()
		ask()
		p.start("--datapath", "kernel")
		away[len(away)-1][1] = time.Now()
		progress()
		ask()
		before := arriving.served.Load()
		wait.True(t, "new connections are served", func() bool { return arriving.served.Load() >= before+int64(perSecond) })
	}
	came := arriving.end()
	end()
	for _, k := range talkers {
		_ = k.conn.Close()
	}
	served := judgeArrivals(t, came, away)
	var records []record
	wait.For(t, "a record for each connection", stopTimeout, func() (err error) {
		if records, err = readRecords(p.accessLog); err != nil {
			return err // half a line, for example, that is being written
		}
		missing := slices.Clone(clients)
		for _, r := range records {
			if i := slices.Index(missing, r.Client.String()); i >= 0 && r.Service != "default/new:http" {
				missing = slices.Delete(missing, i, i+1)
			}
		}
		if len(missing) > 0 {
			return fmt.Errorf("%d connections have no record: %v", len(missing), missing)
		}
		return nil
	})
	p.stop() // ends the sessions
	had, relayed := make(map[string]int), 0
	for _, r := range p.records() {
		had[r.Service+" "+r.Protocol]++
		if r.Path == "relay" && strings.HasPrefix(r.Service, "default/new") {
			relayed++ // too many were undecided at once
			continue
		}
		if r.Path != "kernel" || r.Service != "default/new" && r.Service != "default/new:http" && r.Protocol == "TCP" && (r.End != "client_fin" || r.Attempts != 1) {
			t.Errorf("%+v", r)
		}
	}
	got := had["default/new:http TCP"]
	t.Logf("%d new connections were served; records: %v", served, had)
	if relayed > served/20 {
		t.Errorf("%d of %d new connections were relayed", relayed, served)
	}
	if got < served-lost || got > len(came) {
		t.Errorf("%d records of %d new connections, of which %d were served", got, len(came), served)
	}
	if had["default/web:http TCP"] != connections || had["default/dns:http UDP"] != sessions {
		t.Errorf("records: %v, want %d connections and %d sessions", had, connections, sessions)
	}
}

// lostSYN is how long a client may go on to send a SYN that a busy machine loses.
const lostSYN = 3 * time.Second

// judgeArrivals expects all connections to be served that did not begin while nobody
// decided, and returns how many were served.
func judgeArrivals(t *testing.T, came []arrival, away [][2]time.Time) (served int) {
	t.Helper()
	var late time.Duration
	refused, waited, wrong := 0, 0, 0
	for i := range came {
		x := &came[i]
		alone := slices.ContainsFunc(away, func(a [2]time.Time) bool { return x.began.After(a[0].Add(-lostSYN)) && x.began.Before(a[1]) })
		if x.err == nil {
			served++
			if alone {
				waited++
				late = max(late, x.end.Sub(x.began))
			}
			continue
		}
		if alone && x.refusal() {
			refused++
		} else if wrong++; wrong <= 5 {
			t.Errorf("%s, %v after the start: %v", x.client, x.began.Sub(came[0].began), x.err)
		}
	}
	t.Logf("of %d connections %d began while nobody decided: %d were served, the last after %v, and %d refused; %d others failed", len(came), refused+waited, waited, late, refused, wrong)
	return served
}

// TestPortsUsedAgainWhileTheProcessRests: the kernel still knows a connection that has just been
// reset when its client begins another one by the same port. While the process does not answer,
// as during a take-over, the relay's listening socket has that, and all of its packets.
func TestPortsUsedAgainWhileTheProcessRests(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := newProxy(t, lab.Node)
	p.put(webAtNodePort(lab))
	p.start("--datapath", "kernel")
	for i, address := range addresses(30080, lab.Node.IPv4.String(), lab.Node.IPv6.String()) {
		connect := func() net.Conn {
			t.Helper()
			d := net.Dialer{Timeout: startTimeout, LocalAddr: &net.TCPAddr{Port: 61000 + i}}
			return must.Get(lab.Client.Dialer(&d, "tcp", address))(t)
		}
		c := connect()
		must.OK(t, must.Err(netns.AskOn(c)))
		_ = c.(*net.TCPConn).SetLinger(0)
		_ = c.Close()
		p.signal(unix.SIGSTOP)
		c = connect()
		p.signal(unix.SIGCONT)
		check.OKf(t, must.Err(netns.AskOn(c)), "%s", address)
		_ = c.Close()
	}
	p.stop()
}
