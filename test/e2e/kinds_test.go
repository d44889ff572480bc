package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// kind is a destination about which the table of kernel flows decides.
type kind struct {
	network, to string
}

// kindsLab has a destination of each kind: of TCP and UDP, IPv4 and IPv6, cluster IPs, node ports,
// external and load balancer IPs, with source ranges, by each traffic policy, with session affinity.
type kindsLab struct {
	t     *testing.T
	lab   *netns.Lab
	p     *proxy
	kinds []kind
	fresh []kind                    // of session affinity, which a test asks first when it wants
	homes map[kind]string           // the endpoints that clients have by session affinity
	ports map[string]*atomic.Uint32 // of the client, by network and family
	asked int
}

func newKinds(t *testing.T) *kindsLab {
	w := &kindsLab{t: t, lab: netns.NewLab(t, 2), homes: make(map[kind]string), ports: make(map[string]*atomic.Uint32)}
	for _, n := range []string{"tcp4", "tcp6", "udp4", "udp6"} {
		w.ports[n] = new(atomic.Uint32)
		w.ports[n].Store(40000)
	}
	for _, b := range w.lab.Backends {
		b.WitnessTCP(t, 8080)
		b.WitnessUDP(t, 8080)
	}
	w.p = newProxy(t, w.lab.Node)
	for i, o := range []object{
		{name: "fresh", affinity: true},
		{name: "local", external: "Local", ranges: []string{w.lab.Client.IPv4.String() + "/32", w.lab.Client.IPv6.String() + "/128"}, nodePort: 30080},
		{name: "cluster", nodePort: 30080}, // whose clients are hidden
		{name: "inside", internal: "Local"},
		{name: "sticky", affinity: true},
	} {
		for n, network := range []string{"tcp", "udp"} {
			w.add(o, network, 10*i+n)
		}
	}
	w.p.start("--datapath", "kernel", "--access-log-udp", "all")
	wait.For(t, "the table decides about each kind", startTimeout, func() error {
		decided, _ := w.decided(func() { w.ask(w.kinds, 1) })
		if decided < len(w.kinds) {
			return fmt.Errorf("about %d of %d", decided, len(w.kinds))
		}
		return nil
	})
	return w
}

// add adds a Service with a number of its own.
func (w *kindsLab) add(o object, network string, n int) {
	fresh := o.name == "fresh"
	o.name, o.protocol, o.port, o.target = o.name+network, corev1.Protocol(strings.ToUpper(network)), 80, 8080
	o.vips = []string{fmt.Sprint("10.96.1.", n), fmt.Sprint("fd00:96::1:", n)}
	to := addresses(o.port, o.vips...)
	if o.nodePort != 0 {
		o.nodePort += uint16(n)
		o.externalIPs = []string{fmt.Sprint("192.0.2.1", n), fmt.Sprint("2001:db8::1:", n)}
		o.lbIPs = []string{fmt.Sprint("192.0.2.2", n), fmt.Sprint("2001:db8::2:", n)}
		to = append(to, addresses(o.port, slices.Concat(o.externalIPs, o.lbIPs)...)...)
		to = append(to, addresses(o.nodePort, w.lab.Node.IPv4.String(), w.lab.Node.IPv6.String())...)
	}
	for _, b := range w.lab.Backends {
		o.endpoints = append(o.endpoints, endpoint{host: b, node: "node"})
	}
	w.p.put(&o)
	for _, address := range to {
		k := kind{network, address}
		if o.affinity {
			w.homes[k] = ""
		}
		if fresh {
			w.fresh = append(w.fresh, k)
		} else {
			w.kinds = append(w.kinds, k)
		}
	}
}

// decided returns about how many connections and sessions the table decides meanwhile, and of how many
// the process is asked.
func (w *kindsLab) decided(do func()) (table, process int) {
	w.t.Helper()
	const decided, asked = "sluice_flows_decided_total", "sluice_flows_asked_total"
	before := must.Get(w.p.metrics())(w.t)
	do()
	after := must.Get(w.p.metrics())(w.t)
	return int(after[decided] - before[decided]), int(after[asked] - before[asked])
}

// ask makes some connections, or sessions, of each kind, eight at a time. Each is answered, by the same
// endpoint where session affinity says so.
func (w *kindsLab) ask(kinds []kind, times int) {
	w.t.Helper()
	for _, k := range kinds {
		w.judge(k, w.visits(k, times, 0))
	}
}

// askTogether asks all kinds at the same time, each once in a pace.
func (w *kindsLab) askTogether(kinds []kind, times int, pace time.Duration) {
	w.t.Helper()
	visits := make([][]visit, len(kinds))
	var asking sync.WaitGroup
	for i, k := range kinds {
		asking.Go(func() { visits[i] = w.visits(k, times, pace) })
	}
	asking.Wait()
	for i, k := range kinds {
		w.judge(k, visits[i])
	}
}

// visits makes connections, or sessions, of a kind, eight at a time.
func (w *kindsLab) visits(k kind, times int, pace time.Duration) []visit {
	began := time.Now()
	return crowd(times, 8, func(i int) visit {
		<-time.After(time.Until(began.Add(time.Duration(i) * pace)))
		return visit{name: w.visit(k)}
	})
}

// judge expects that all were answered.
func (w *kindsLab) judge(k kind, visits []visit) {
	w.t.Helper()
	for _, v := range visits {
		if v.name != "b1:8080" && v.name != "b2:8080" {
			w.t.Fatalf("%v: %s", k, v.name)
		}
		if home, sticky := w.homes[k]; sticky && home != "" && home != v.name {
			w.t.Fatalf("%v: %s after %s", k, v.name, home) // A5.2
		} else if sticky {
			w.homes[k] = v.name
		}
	}
	w.asked += len(visits)
}

// all returns the kinds, those first of which nobody is remembered.
func (w *kindsLab) all() []kind { return slices.Concat(w.fresh, w.kinds) }

// group returns one kind of each network and family, and whether there is another group.
func (w *kindsLab) group(n int) (kinds []kind, more bool) {
	seen := make(map[*atomic.Uint32]int)
	for _, k := range w.all() {
		_, ports := w.from(k)
		if seen[ports] == n {
			kinds = append(kinds, k)
		}
		seen[ports]++
		more = more || seen[ports] > n+1
	}
	return kinds, more
}

// from returns the client's address for a kind, and its ports.
func (w *kindsLab) from(k kind) (netip.Addr, *atomic.Uint32) {
	if netip.MustParseAddrPort(k.to).Addr().Is6() {
		return w.lab.Client.IPv6, w.ports[k.network+"6"]
	}
	return w.lab.Client.IPv4, w.ports[k.network+"4"]
}

// visit returns the name of the server that answers a connection. It has a port of its own: with one that
// another connection of the client has at the endpoint, the process would be asked.
func (w *kindsLab) visit(k kind) (said string) {
	address, port := w.from(k)
	own := netip.AddrPortFrom(address, uint16(port.Add(1)))
	d := &net.Dialer{Timeout: startTimeout, LocalAddr: net.TCPAddrFromAddrPort(own)}
	if k.network == "udp" {
		d.LocalAddr = net.UDPAddrFromAddrPort(own)
	}
	conn, err := w.lab.Client.Dialer(d, k.network, k.to)
	if err != nil {
		return trouble(err)
	}
	defer conn.Close()
	if k.network == "udp" {
		said, err = exchange(conn, "hello", startTimeout)
		said, _, _ = strings.Cut(said, "\n")
	} else {
		said, err = netns.AskOn(conn)
	}
	if err != nil {
		return trouble(err)
	}
	name, _, _ := strings.Cut(said, " ")
	return name
}

// TestKnownKindsMakeNoUpcall: the table decides about all connections and sessions of the kinds that it
// knows, so that none waits for the process or costs it a decision.
func TestKnownKindsMakeNoUpcall(t *testing.T) {
	t.Parallel()
	w := newKinds(t)
	const each = 20
	kinds := w.all()
	if table, process := w.decided(func() { w.ask(kinds, each) }); table != each*len(kinds) || process != 0 {
		t.Errorf("of %d connections and sessions the table decided about %d, and the process was asked %d times", each*len(kinds), table, process)
	}
}
