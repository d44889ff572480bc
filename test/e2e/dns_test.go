package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// dnsTextLength exceeds an answer over UDP (512 bytes), in strings of 255 bytes.
const dnsTextLength = 800

// dnsPort is the port of the servers.
const dnsPort = 53

// dnsServer is a dnsmasq on a host. It answers any name of the zone "test" with
// its own address, and big.test with a long text.
type dnsServer struct {
	host *netns.Host
	data netip.Addr
	cmd  *netns.Cmd
	gone chan struct{} // closed when it has ended and was waited for
}

// start runs the server and waits until it answers.
func (d *dnsServer) start(t *testing.T) {
	t.Helper()
	d.launch(t)
	wait.For(t, "dnsmasq answers", startTimeout, func() error {
		select {
		case <-d.gone:
			// The previous server has a process for each connection, which may
			// still hold the port.
			d.launch(t)
		default:
		}
		return d.host.Do(func() error {
			// Over TCP a stopped server refuses.
			_, err := newResolver(netip.AddrPortFrom(d.host.IPv4, dnsPort)).exchangeTCP(dnsQuestion(1, "ready", dnsA))
			return err
		})
	})
}

func (d *dnsServer) launch(t *testing.T) {
	t.Helper()
	cmd, gone := d.host.Command(t, administration(t, "dnsmasq"), "--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=",
		"--user=root", "--group=root", "--no-resolv", "--no-hosts", "--cache-size=0", "--log-facility=-", "--local=/test/",
		"--address=/test/"+d.data.String(), "--txt-record=big.test,"+dnsText()), make(chan struct{})
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	must.OK(t, cmd.Start())
	d.cmd, d.gone = cmd, gone
	go func() {
		_ = cmd.Wait()
		close(gone)
	}()
	t.Cleanup(d.stop)
}

// stop kills the server and its processes, like a deleted pod.
func (d *dnsServer) stop() {
	_ = d.cmd.Cancel()
	<-d.gone
}

// dnsText is the text of big.test: strings separated by commas.
func dnsText() string {
	left := dnsTextLength
	var parts []string
	for left > 0 {
		n := min(left, 255)
		parts = append(parts, strings.Repeat("x", n))
		left -= n
	}
	return strings.Join(parts, ",")
}

// TestDNSServersAreCycled asks two DNS servers behind a Service with one port
// number for UDP and TCP. Meanwhile the servers terminate, are not ready, are
// removed and come back. A resolver must get an answer to each question, from the
// address that it asked and with the id that it used.
func TestDNSServersAreCycled(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		if m.lacks(datagrams) {
			return
		}
		questions := 2000
		if full() {
			questions = 200000
		}
		c := netns.NewCluster(t)
		servers := []*dnsServer{
			{host: c.Pods[0], data: netip.MustParseAddr("192.0.2.1")},
			{host: c.Remote[0], data: netip.MustParseAddr("192.0.2.2")},
		}
		here, there := endpoint{host: c.Pods[0], node: "node"}, endpoint{host: c.Remote[0], node: "node2"}
		o := &object{
			name: "dns", kind: corev1.ServiceTypeClusterIP, vips: []string{vip4, vip6}, port: dnsPort, target: dnsPort,
			protocol: corev1.ProtocolUDP, portName: "dns", twin: true, endpoints: []endpoint{here, there},
		}
		for _, s := range servers {
			s.start(t)
		}
		p := newClusterProxy(t, c)
		p.mode = m
		p.put(o)
		p.start(decisionFlags("--access-log-udp", "off")...)
		ask := startQuestions(c, o, questions)
		put := func(list ...endpoint) {
			o.endpoints = list
			p.settled(func() { p.put(o) })
		}
		in := func(e endpoint, s endpointState) endpoint { e.state = s; return e }
		rounds := 0
		for ; rounds == 0 || !ask.over(); rounds++ {
			put(in(here, terminating), there)
			put(there)
			put(here, there)
			put(here, in(there, unready))
			put(here, there)
			// A replaced pod answers nobody before the Service names it.
			one, other, rest := servers[rounds%2], here, there
			if rounds%2 == 1 {
				other, rest = there, here
			}
			one.stop()
			put(rest)
			one.start(t)
			put(rest, other)
		}
		ask.wait()
		total := ask.total
		t.Logf("%d questions in %d rounds of changes: %d asked again, %d answers came late, %d refused on the spot, %d over TCP, answered by %v",
			questions, rounds, total.again, total.late, total.refused, total.overTCP, total.answered)
		for _, err := range ask.first {
			t.Error(err)
		}
		if ask.failed > 0 {
			t.Errorf("%d questions failed", ask.failed)
		}
		for _, s := range servers {
			if total.answered[s.data] == 0 {
				t.Errorf("%s answered no question", s.host.Name())
			}
		}
		p.stop()
	})
}

// questions are asked by resolvers on several hosts.
type questions struct {
	left    atomic.Int64
	pending sync.WaitGroup

	mu     sync.Mutex
	total  resolver // guarded by mu
	failed int      // likewise
	first  []error  // likewise
}

// startQuestions asks n questions of an object, from pods, the node and outside,
// over both families.
func startQuestions(c *netns.Cluster, o *object, n int) *questions {
	q := &questions{total: resolver{answered: map[netip.Addr]int{}}}
	q.left.Store(int64(n))
	for _, h := range []*netns.Host{c.Pods[1], c.Node, c.Outside, c.Node2} {
		for _, to := range o.at(clusterIP) {
			q.pending.Go(func() {
				r := newResolver(to)
				if err := h.Do(func() error { q.ask(r); return nil }); err != nil {
					q.failure(err)
				}
				r.close()
				q.add(r)
			})
		}
	}
	return q
}

func (q *questions) over() bool { return q.left.Load() <= 0 }

func (q *questions) wait() { q.pending.Wait() }

// ask asks until there were enough questions. Few questions need TCP.
func (q *questions) ask(r *resolver) {
	for {
		i := q.left.Add(-1)
		if i < 0 {
			return
		}
		var err error
		if i%50 == 0 {
			err = r.ask("big", dnsTXT)
		} else {
			err = r.ask(fmt.Sprintf("q%d", i), dnsA)
		}
		if err != nil {
			q.failure(fmt.Errorf("from %v: %w", r.server, err))
		}
	}
}

func (q *questions) failure(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.failed++
	if len(q.first) < 5 {
		q.first = append(q.first, err)
	}
}

func (q *questions) add(r *resolver) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.total.again += r.again
	q.total.late += r.late
	q.total.refused += r.refused
	q.total.overTCP += r.overTCP
	for a, n := range r.answered {
		q.total.answered[a] += n
	}
}
