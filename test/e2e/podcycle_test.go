package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// cycleBound is the time after which a client that is still not served fails the
// test. The promise is 100 ms, which a busy machine may miss.
const cycleBound = startTimeout

// TestPodCyclesKeepUDPClients plays the cycles of a server's pod that Kubernetes
// tests (A8.2 to A8.6). The clients never close their sockets: pods, the node and
// others, at cluster IPs and node ports. Each client must be served again soon
// after the Service has an endpoint again.
func TestPodCyclesKeepUDPClients(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		if m.lacks(datagrams) {
			return
		}
		c := netns.NewCluster(t)
		here, there := endpoint{host: c.Pods[0], node: "node"}, endpoint{host: c.Remote[0], node: "node2"}
		o := &object{
			name: "web", kind: corev1.ServiceTypeNodePort, vips: []string{vip4, vip6}, port: 1000, nodePort: 30000, target: 9000,
			protocol: corev1.ProtocolUDP, endpoints: []endpoint{here},
		}
		first := here.host.WitnessUDP(t, 9000)
		p := newClusterProxy(t, c)
		p.mode = m
		p.put(o)
		p.start(decisionFlags()...)

		var list callers
		for _, h := range []*netns.Host{c.Pods[1], c.Node, c.Outside, c.Node2} {
			for _, to := range slices.Concat(o.at(clusterIP), o.at(nodePort)) {
				list = append(list, call(t, h, to))
			}
		}
		put := func(endpoints ...endpoint) {
			t.Helper()
			o.endpoints = endpoints
			p.settled(func() { p.put(o) })
		}
		// served changes the endpoints and expects one of them to serve all
		// clients.
		served := func(what string, e endpoint) {
			t.Helper()
			o.endpoints = []endpoint{e}
			began := time.Now()
			p.put(o)
			times := list.served(t, what, fmt.Sprintf("%s:%d", e.host.Name(), o.target), began)
			t.Logf("%s: %d clients were served after %v, the last after %v", what, len(times), times[len(times)/2], times[len(times)-1])
		}
		list.served(t, "at first", "pod-1:9000", time.Now())

		first.Close()
		put()
		there.host.WitnessUDP(t, 9000)
		served("server pod replaced", there)

		waiting := there
		waiting.state = unready
		put(waiting)
		served("unready endpoint gets ready", there)

		there.host.WitnessUDP(t, 9001)
		o.target = 9001
		served("target port changed", there)

		put()
		o.internal = "Local"
		local := here.host.WitnessUDP(t, 9001)
		served("internal traffic policy Local", here)
		local.Close()
		put()
		here.host.WitnessUDP(t, 9001)
		served("local server pod replaced", here)
		p.stop()
	})
}

// caller sends datagrams periodically from one socket, and notes who answers.
type caller struct {
	from string
	conn *net.UDPConn
	to   netip.AddrPort

	mu   sync.Mutex
	sent []time.Time // when each datagram was sent; guarded by mu
	by   string      // who sent the last answer; guarded by mu
	last time.Time   // when its question was sent; guarded by mu
	came time.Time   // when it arrived; guarded by mu
}

// callPeriod is the time between a caller's datagrams.
const callPeriod = 5 * time.Millisecond

// call starts to send. It stops with the test.
func call(t *testing.T, h *netns.Host, to netip.AddrPort) *caller {
	t.Helper()
	conn := must.Get(h.Dial("udp", to.String()))(t)
	c := &caller{from: h.Name(), conn: conn.(*net.UDPConn), to: to}
	stop := make(chan struct{})
	var pending sync.WaitGroup
	pending.Go(func() { c.ask(stop) })
	pending.Go(func() { c.listen(stop) })
	t.Cleanup(func() {
		close(stop)
		_ = conn.Close()
		pending.Wait()
	})
	return c
}

// ask sends datagrams with their numbers. A client has to accept refusals while
// there is no endpoint.
func (c *caller) ask(stop chan struct{}) {
	tick := time.NewTicker(callPeriod)
	defer tick.Stop()
	for i := 0; ; i++ {
		c.mu.Lock()
		c.sent = append(c.sent, time.Now())
		c.mu.Unlock()
		_, _ = fmt.Fprintf(c.conn, "%d", i)
		select {
		case <-stop:
			return
		case <-tick.C:
		}
	}
}

// listen receives answers: a server's name, a space, the client's address as the
// server saw it, a newline and the datagram's number.
func (c *caller) listen(stop chan struct{}) {
	buf := make([]byte, 2048)
	for {
		n, err := c.conn.Read(buf)
		select {
		case <-stop:
			return
		default:
		}
		if err != nil {
			continue
		}
		head, body, _ := strings.Cut(string(buf[:n]), "\n")
		name, _, _ := strings.Cut(head, " ")
		var number int
		if _, err := fmt.Sscan(body, &number); err != nil {
			continue
		}
		c.mu.Lock()
		if number < len(c.sent) && c.sent[number].After(c.last) {
			c.by, c.last, c.came = name, c.sent[number], time.Now()
		}
		c.mu.Unlock()
	}
}

// served tells whether, and when, a server answered a datagram that was sent after
// a moment.
func (c *caller) served(by string, since time.Time) (time.Duration, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.last.Before(since) {
		return 0, fmt.Errorf("%s to %s: no answer", c.from, c.to)
	}
	if c.by != by {
		return 0, fmt.Errorf("%s to %s: answered by %s, want %s", c.from, c.to, c.by, by)
	}
	return c.came.Sub(since), nil
}

type callers []*caller

// served waits until a server serves each caller, and returns how long that took
// each of them since a moment, sorted.
func (l callers) served(t *testing.T, what, by string, since time.Time) []time.Duration {
	t.Helper()
	took := make([]time.Duration, len(l))
	wait.For(t, what, cycleBound, func() error {
		for i, c := range l {
			if took[i] > 0 {
				continue
			}
			d, err := c.served(by, since)
			if err != nil {
				return err
			}
			took[i] = max(d, 1)
		}
		return nil
	})
	slices.Sort(took)
	return took
}
