package stream

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/objects"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// journal is a log that tests read.
type journal struct{ output.Text }

// lines gives the lines that hold a text.
func (j *journal) lines(text string) (found []string) {
	for l := range strings.Lines(j.String()) {
		if strings.Contains(l, text) {
			found = append(found, l)
		}
	}
	return found
}

// onAddresses has a node know its own addresses, and gives its log.
func onAddresses(lab *netns.Lab, more ...netip.Addr) (func(*setup), *journal) {
	j := new(journal)
	return func(o *setup) {
		o.Logger = zerolog.New(j)
		o.HostAddresses = func() []netip.Addr {
			return append([]netip.Addr{lab.Node.IPv4, lab.Node.IPv6}, more...)
		}
	}, j
}

// nodePort gives a service of web a node port.
func nodePort(c service.Change, port int32) service.Change {
	c.Services[0].Spec.Type = corev1.ServiceTypeNodePort
	c.Services[0].Spec.Ports[0].NodePort = port
	return c
}

// outcome tells what a connect comes to: the name of who answers, refused,
// silence, or reset. Where silence is wanted it waits for less.
func (n *node) outcome(from *netns.Host, address, want string) string {
	n.t.Helper()
	wait := patience
	if want == "silence" {
		wait = 300 * time.Millisecond
	}
	c, err := from.Dialer(&net.Dialer{Timeout: wait}, "tcp", address)
	if err == nil {
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(patience))
		var name string
		if name, err = netns.AskOn(c); err == nil {
			return name
		}
	}
	var timeout net.Error
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case errors.Is(err, syscall.ECONNRESET):
		return "reset"
	case errors.As(err, &timeout) && timeout.Timeout():
		return "silence"
	}
	return err.Error()
}

func (n *node) want(from *netns.Host, address, want string) {
	n.t.Helper()
	check.Equalf(n.t, n.outcome(from, address, want), want, "%s from %s", address, from.Name())
}

// pass lets the grace period end, and does what is due.
func (n *node) pass() {
	n.t.Helper()
	n.passed.Add(int64(redirect.Grace) + 1)
	n.maintain()
}

// maintain does what is due.
func (n *node) maintain() {
	n.t.Helper()
	must.OK(n.t, n.lab.Node.Do(func() error { _, err := n.manager.Maintain(); return err }))
}

func destination(a string) service.Destination {
	at := netip.MustParseAddrPort(a)
	return service.Destination{Addr: at.Addr(), Port: at.Port(), Protocol: service.TCP}
}

// Rule A3.15: a node port is a listening socket on the node's addresses, and
// what becomes of the service becomes of the port, which stays ours.
func TestA315_NodePortIsBound(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	options, _ := onAddresses(lab)
	n := newNode(t, lab, options)
	n.policy.LocalhostNodePorts = true
	live := n.echo(0, 8080)
	addresses := []string{"10.1.0.1:30080", "127.0.0.1:30080"}
	ours := func() {
		t.Helper()
		for _, a := range append(addresses, ":30080") {
			if l, err := lab.Node.Listen("tcp", a); !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("another program listens on %s: %v", a, err)
				if err == nil {
					_ = l.Close()
				}
			}
		}
	}
	want := func(outcome string) {
		t.Helper()
		n.want(lab.Client, addresses[0], outcome)
		for _, a := range addresses {
			n.want(lab.Node, a, outcome)
		}
		ours()
	}
	full := nodePort(web("web", "10.96.0.1", live), 30080)
	n.apply(full)
	want("b1:8080")
	if !n.steer.plan.Own.Has(destination(addresses[0])) || n.steer.plan.NonLocal.Len() != 0 {
		t.Errorf("own %v, foreign %v", n.steer.plan.Own, n.steer.plan.NonLocal)
	}
	open := n.dial(addresses[0])
	name(t, open)
	for range 2 {
		n.apply(service.Change{Deleted: objects.Gone("web", 1).Deleted[1:]})
		want("refused") // A3.4
		local := nodePort(web("web", "10.96.0.1", live), 30080)
		local.Services[0].Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
		n.apply(local)
		n.want(lab.Client, addresses[0], "silence") // A3.5
		n.want(lab.Node, addresses[0], "b1:8080")   // A3.6
		ours()
		n.apply(full)
		want("b1:8080")
	}
	n.apply(objects.Gone("web", 1))
	n.want(lab.Client, addresses[0], "refused")
	wait.True(t, "the port is free", func() bool {
		n.pass()
		l, err := lab.Node.Listen("tcp", ":30080")
		if err != nil {
			return false
		}
		return l.Close() == nil
	})
	// A8.7: what was accepted by any of these sockets goes on.
	must.OK(t, must.Err(open.Write([]byte("still there"))))
	buf := make([]byte, 11)
	if _, err := io.ReadFull(open, buf); err != nil || string(buf) != "still there" {
		t.Fatalf("%q, %v", buf, err)
	}
	if claims, listeners := n.manager.Stats().Claims, n.server.Stats().Listeners; claims != 0 || listeners != 0 {
		t.Errorf("%d bound ports, %d listeners left", claims, listeners)
	}
}

// Rule A3.15: a port that another program holds is reported, everything else
// works, and it is taken as soon as it is free.
func TestA315_ConflictIsReportedAndRetried(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	options, log := onAddresses(lab)
	n := newNode(t, lab, options)
	n.policy.LocalhostNodePorts = true
	other := must.Get(lab.Node.Listen("tcp", ":30080"))(t)
	n.apply(nodePort(web("web", "10.96.0.1", n.echo(0, 8080)), 30080))
	for range 3 {
		n.maintain()
	}
	n.want(lab.Client, "10.96.0.1:80", "b1:8080")
	if got := n.manager.Stats(); got.Conflicts != 2 || got.ConflictsTotal != 2 || got.Claims != 0 {
		t.Errorf("conflicts %d, in all %d, claims %d", got.Conflicts, got.ConflictsTotal, got.Claims)
	}
	lines := log.lines("another program listens there")
	if len(lines) != 1 || !strings.Contains(lines[0], `"object":"Service test/web"`) || !strings.Contains(lines[0], "node port 30080/TCP on 10.1.0.1 and 127.0.0.1") {
		t.Errorf("log: %q", lines)
	}
	if n.steer.plan.Own.Len() != 0 || n.manager.NextMaintenance() > time.Second {
		t.Errorf("own %v, next maintenance in %s", n.steer.plan.Own, n.manager.NextMaintenance())
	}
	_ = other.Close()
	n.maintain()
	n.want(lab.Client, "10.1.0.1:30080", "b1:8080")
	if got := n.manager.Stats(); got.Conflicts != 0 || got.Claims != 2 || n.steer.plan.Own.Len() != 2 {
		t.Errorf("conflicts %d, claims %d, own %v", got.Conflicts, got.Claims, n.steer.plan.Own)
	}
	if lines := log.lines("is served now"); len(lines) != 1 {
		t.Errorf("log: %q", lines)
	}
}

// With more node ports than may be held, those that came first stay.
func TestBoundPortsAreLimited(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	options, log := onAddresses(lab)
	n := newNode(t, lab, func(o *setup) {
		options(o)
		o.MaxBound, o.MaxConnections, o.Config.Descriptors = 8, 1000, 24 // half of them for one namespace
	})
	n.policy.LocalhostNodePorts = true
	ep := n.echo(0, 8080)
	for i := range 4 {
		n.apply(nodePort(web(fmt.Sprintf("s%d", i), fmt.Sprintf("10.96.0.%d", i+1), ep), int32(30000+i)))
	}
	n.want(lab.Client, "10.1.0.1:30000", "b1:8080")
	n.want(lab.Client, "10.1.0.1:30001", "b1:8080")
	n.want(lab.Client, "10.1.0.1:30002", "refused")
	n.want(lab.Client, "10.96.0.4:80", "b1:8080")
	if got := n.manager.Stats(); got.Claims != 4 || got.Unclaimed != 4 || got.Conflicts != 0 {
		t.Errorf("claims %d, unclaimed %d, conflicts %d", got.Claims, got.Unclaimed, got.Conflicts)
	}
	check.Equalf(t, n.server.limit.Load(), 10, "connections possible beside 4 of 24 descriptors")
	if lines := log.lines("--max-claims"); len(lines) != 2 {
		t.Errorf("log: %q", lines)
	}
	n.apply(objects.Gone("s0", 1))
	n.maintain()
	if got := n.manager.Stats(); got.Claims != 4 || got.Unclaimed != 2 {
		t.Errorf("%d claims, %d without, after one service made room", got.Claims, got.Unclaimed)
	}
}

// An external IP is steered while it is nobody's, and a listening socket's once
// an interface of the node has it; connections go on through both changes.
func TestExternalIPComesToTheNodeAndGoes(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	vip := netip.MustParseAddr("192.0.2.1")
	var mu sync.Mutex
	host := []netip.Addr{lab.Node.IPv4, lab.Node.IPv6}
	n := newNode(t, lab, func(o *setup) {
		o.HostAddresses = func() []netip.Addr {
			mu.Lock()
			defer mu.Unlock()
			return append([]netip.Addr(nil), host...)
		}
	})
	c := web("web", "10.96.0.1", n.echo(0, 8080))
	c.Services[0].Spec.ExternalIPs = []string{vip.String()}
	n.apply(c)
	dst := destination("192.0.2.1:80")
	if target, _ := n.steer.plan.Steer.Get(dst); !n.steer.plan.NonLocal.Has(vip) || target.Port == 0 || target.FD == 0 {
		t.Errorf("A3.13: foreign %v, steer %v", n.steer.plan.NonLocal, n.steer.plan.Steer)
	}
	must.OK(t, lab.Node.AddAddr("lo", netip.PrefixFrom(vip, 32)))
	mu.Lock()
	host = append(host, vip)
	mu.Unlock()
	n.maintain()
	n.want(lab.Client, "192.0.2.1:80", "b1:8080")
	own := n.steer.plan.Own.Has(dst)
	if !own || n.steer.plan.Steer.Has(dst) || n.steer.plan.NonLocal.Len() != 0 {
		t.Errorf("A3.15: own %v, steer %v, foreign %v", n.steer.plan.Own, n.steer.plan.Steer, n.steer.plan.NonLocal)
	}
	mu.Lock()
	host = host[:2]
	mu.Unlock()
	n.maintain()
	if !n.steer.plan.Steer.Has(dst) || n.steer.plan.Own.Len() != 0 || n.manager.Stats().Claims != 0 {
		t.Errorf("steer %v, own %v", n.steer.plan.Steer, n.steer.plan.Own)
	}
}

// A destination on a foreign address lingers in the plan as long as connections
// use it (A8.7).
func TestA87_ForeignDestinationLingers(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, 1)
	vip := netip.MustParseAddr("192.0.2.1")
	n := newNode(t, lab, func(o *setup) { o.Redirector.(*spy).Redirector = nowhere{} })
	c := web("web", "10.96.0.1", n.echo(0, 8080))
	c.Services[0].Spec.ExternalIPs = []string{vip.String()}
	n.apply(c)
	// Nothing is steered here: the connection comes to the listening socket by the address
	// itself, which the node has for the moment.
	target, _ := n.steer.plan.Steer.Get(destination("192.0.2.1:80"))
	record := conntrack.Record{VIP: netip.MustParseAddrPort("192.0.2.1:80"), Protocol: service.TCP, Start: 1}
	w := n.server.workers[0]
	done := make(chan struct{})
	w.post(func() { w.shard.Open(&record); close(done) })
	<-done
	if target.Port == 0 {
		t.Fatal("not steered")
	}
	n.apply(objects.Gone("web", 1))
	lingers := func() (dst, addr bool) {
		dst = n.steer.plan.Lingering.Has(destination("192.0.2.1:80"))
		addr = n.steer.plan.NonLocal.Has(vip)
		return dst, addr
	}
	n.maintain()
	if dst, addr := lingers(); !dst || !addr || n.steer.plan.Steer.Len() != 0 {
		t.Errorf("lingering %v, foreign %v, steer %v", n.steer.plan.Lingering, n.steer.plan.NonLocal, n.steer.plan.Steer)
	}
	done = make(chan struct{})
	w.post(func() { w.shard.Close(&record); close(done) })
	<-done
	n.pass()
	if dst, addr := lingers(); dst || addr {
		t.Errorf("lingering %v, foreign %v when nothing uses them", n.steer.plan.Lingering, n.steer.plan.NonLocal)
	}
}

// nowhere is a Redirector that steers nothing.
type nowhere struct{ bindEach bool }

func (n nowhere) Traits() redirect.Traits {
	return redirect.Traits{Name: "nowhere", BindEach: n.bindEach}
}

func (nowhere) Apply(redirect.Plan) error { return nil }
func (nowhere) Verify() (bool, error)     { return false, nil }
func (nowhere) Changed() <-chan struct{}  { return nil }
func (nowhere) Close() error              { return nil }
func (nowhere) Leave()                    {}
