package e2e

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// loadSize is what runs beside take-overs.
type loadSize struct {
	takeOvers int
	talkers   int           // connections that send both ways
	pace      time.Duration // between two pieces of a talk, or 0
	each      int           // connections that are half-closed, with a slow reader, and being dialled in each take-over
	idle      int
	sessions  int // of UDP
	perSecond int // new connections, and as many questions of new UDP sockets
}

// TestPromise7_TakeOversUnderLoad: processes take over from each other beside connections and UDP
// sessions of all kinds, and new ones, by cluster IPs and node ports of both families. None is
// refused, reset or loses anything; each has one record. SLUICE_TEST_UNPACED=1 has kernel flows carry as
// many talks as the machine can.
func TestPromise7_TakeOversUnderLoad(t *testing.T) {
	size := loadSize{takeOvers: 2, talkers: 8, each: 5, idle: 10, sessions: 20, perSecond: 50}
	if full() {
		size = loadSize{takeOvers: 20, talkers: 1000, pace: 250 * time.Millisecond, each: 100, idle: 3600, sessions: 1000, perSecond: 1000}
	}
	paced := size
	if os.Getenv("SLUICE_TEST_UNPACED") == "" {
		paced.pace = max(size.pace, 10*time.Millisecond) // talks are thousands a second otherwise
	}
	t.Run("kernel", func(t *testing.T) { paced.play(t, mode{}, "--datapath", "kernel") })
	t.Run("relay", func(t *testing.T) {
		if !full() {
			forModes(t, func(t *testing.T, m mode) {
				size := paced
				if m.name == modes[0].name {
					size.pace = 0 // the modes share the relay
				}
				size.play(t, m, "--datapath", "relay")
			})
			return
		}
		for _, m := range modes {
			size := size
			if m.name == "bind" || m.name == "sklookup" {
				size.idle = 500 // their reply ports bound the connections to one endpoint
			}
			t.Run(m.name, func(t *testing.T) { size.play(t, m, "--datapath", "relay") })
		}
	})
}

func (size loadSize) play(t *testing.T, mode mode, flags ...string) {
	if !slices.Contains(flags, "kernel") { // there, the process would decide about each session
		flags = append(flags, "--max-udp-sessions", "3000")
	}
	strict, before := netns.LongBacklog(t), netns.Dropped(t)
	m := newMovers(t, mode, size.each, size.idle, size.pace, flags...)
	l := newLoad(t, m)
	m.talk(t, size.talkers)
	l.numbered.open(t, l.sessions, size.sessions)
	for _, list := range [][]*target{l.tcp, l.udp} {
		m.running.Go(func() { l.come(t, list, size.perSecond) })
	}
	began := time.Now()
	for range size.takeOvers {
		l.progress(t)
		m.takeOver(t, size.talkers/4, size.each)
	}
	l.progress(t)
	took := time.Since(began)
	m.quit()
	newcomers := l.served()
	m.end(t)
	m.checkRecords(t)
	l.checkRecords(t)
	l.checkLosses(t, netns.Dropped(t)-before, strict)
	t.Logf("%d take-overs in %v beside %d talks, %d other connections, %d newcomers (%.0f a second), and %d sessions",
		size.takeOvers, took, m.count.Load(), len(m.slow)+len(m.half)+len(m.idle)+len(m.dialled), newcomers, float64(newcomers)/took.Seconds(), len(l.numbered.sessions))
}

// load is what runs beside movers.
type load struct {
	m        *movers
	ask      takeOvers // for its questions
	tcp, udp []*target
	numbered *numbered
	repeated atomic.Int64 // questions that were asked again
	sessions []string     // where they are
}

func newLoad(t *testing.T, m *movers) *load {
	t.Helper()
	l := &load{m: m, ask: takeOvers{lab: m.lab}, numbered: &numbered{lab: m.lab, stop: m.stop, seen: make(map[uint32]*numberedPeer)}}
	l.numbered.serve(t, 8085)
	for _, b := range m.lab.Backends {
		b.EchoTCP(t, 8084)
		b.EchoUDP(t, 8084)
	}
	tcp := webService{name: "new", vips: []string{"10.96.0.31", "fd00:96::31"}, port: 80, nodePort: 30081, endpoints: on(8084, m.lab.Backends...)}
	udp := webService{name: "dns", vips: []string{"10.96.0.53", "fd00:96::53"}, port: 53, nodePort: 30053, protocol: "UDP", endpoints: tcp.endpoints}
	numbers := webService{name: "numbers", vips: []string{"10.96.0.32", "fd00:96::32"}, port: 80, nodePort: 30082, protocol: "UDP", endpoints: on(8085, m.lab.Backends...)}
	m.p.apply(tcp)
	m.p.write("dns.yaml", udp.annotated(`sluice.dev/udp-timeout: "10s"`))
	m.p.apply(numbers)
	for _, address := range tcp.destinations(m.lab) {
		l.tcp = append(l.tcp, &target{network: "tcp", address: address})
	}
	for _, address := range udp.destinations(m.lab) {
		l.udp = append(l.udp, &target{network: "udp", address: address})
	}
	for _, g := range slices.Concat(l.tcp, l.udp) {
		wait.For(t, "the Service is served", startTimeout, func() error {
			err := l.ask.askOnce(g)
			if err == nil {
				g.served.Add(1)
			}
			return err
		})
	}
	l.sessions = numbers.destinations(m.lab)
	return l
}

// mostNewcomers bounds the newcomers of each kind that have no answer yet.
const mostNewcomers = 300

// come has newcomers ask each target in turn, at a rate.
func (l *load) come(t *testing.T, list []*target, perSecond int) {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	room := make(chan struct{}, mostNewcomers)
	began, due := time.Now(), 0
	for i := 0; ; i++ {
		for i >= due {
			select {
			case <-l.m.stop:
				return
			case now := <-tick.C:
				due = int(now.Sub(began).Seconds() * float64(perSecond))
			}
		}
		g := list[i%len(list)]
		room <- struct{}{}
		l.m.running.Go(func() {
			defer func() { <-room }()
			if err := l.question(g, i); err != nil {
				t.Errorf("%s %s, after %d that were served: %v", g.network, g.address, g.served.Load(), err)
				return
			}
			g.served.Add(1)
		})
	}
}

// newcomerPorts is how many local ports newcomers of UDP have, each in turn towards each target.
const newcomerPorts = 4501

// question is that of a newcomer. Ports of UDP are above those of the kernel.
func (l *load) question(g *target, i int) error {
	if g.network == "tcp" {
		return l.ask.askOnce(g)
	}
	const first = 61000
	for ; ; i++ {
		d := net.Dialer{LocalAddr: &net.UDPAddr{Port: first + i%newcomerPorts}}
		c, err := l.m.lab.Client.Dialer(&d, "udp", g.address)
		if err == nil {
			defer c.Close()
			return l.repeat(c)
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return err
		}
	}
}

// repeat asks until there is an answer: checkLosses counts what was lost.
func (l *load) repeat(c net.Conn) (err error) {
	for range 6 {
		if err = askByDatagram(c, startTimeout/6); !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		l.repeated.Add(1)
	}
	return err
}

// checkLosses expects that no datagram was lost. Where the kernel's backlog is short, it may have dropped some.
func (l *load) checkLosses(t *testing.T, dropped uint64, strict bool) {
	t.Helper()
	err, repeated := l.numbered.failed(), l.repeated.Load()
	report := t.Logf
	if (strict || dropped == 0) && (err != nil || repeated > 0) {
		report = t.Errorf
	}
	if report("%d questions were lost, and the kernel has dropped %d packets that waited for a CPU; %v", repeated, dropped, err); repeated == 0 {
		return
	}
	for _, h := range append([]*netns.Host{l.m.lab.Client, l.m.lab.Node}, l.m.lab.Backends...) {
		full, ports := h.Counter(t, "snmp", "Udp:", "RcvbufErrors"), h.Counter(t, "snmp", "Udp:", "NoPorts")
		t.Logf("%s: %d datagrams of IPv4 for which a queue had no room, %d for no socket", h.Name(), full, ports)
	}
}

// progress waits until newcomers at each target have been served, and sessions have gone on.
func (l *load) progress(t *testing.T) {
	t.Helper()
	all := slices.Concat(l.tcp, l.udp)
	var from []int64
	for _, g := range all {
		from = append(from, g.served.Load())
	}
	wait.For(t, "newcomers are served", startTimeout, func() error {
		for i, g := range all {
			if n := g.served.Load() - from[i]; n < 5 && !t.Failed() {
				return fmt.Errorf("%s %s served %d", g.network, g.address, n)
			}
		}
		return nil
	})
	l.numbered.progress(t)
}

// served counts newcomers, and those of TCP as connections beside the movers.
func (l *load) served() (n int64) {
	for _, g := range slices.Concat(l.tcp, l.udp) {
		n += g.served.Load()
		if g.network == "tcp" {
			l.m.beside += int(g.served.Load())
		}
	}
	return n
}

// checkRecords expects one record of each UDP session.
func (l *load) checkRecords(t *testing.T) {
	t.Helper()
	var numbers []record
	newcomers := make(map[string]int64)
	for _, r := range l.m.p.records() {
		switch {
		case r.Protocol != "UDP":
		case slices.Contains(l.sessions, r.VIP.String()):
			numbers = append(numbers, r)
		default:
			newcomers[r.VIP.String()]++
		}
	}
	if l.numbered.failed() == nil {
		l.numbered.checkRecords(numbers)
	}
	for _, g := range l.udp {
		// A port that comes again may find its session, which take-overs keep for longer. A question that
		// is asked again may not.
		if n, most := newcomers[g.address], g.served.Load(); n > most+l.repeated.Load() || n < min(most, newcomerPorts) {
			t.Errorf("%d records of %d questions to %s", n, most, g.address)
		}
	}
}
