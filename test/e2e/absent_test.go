package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestAbsentProcessRefusesNobody kills the process, and asks each kind of destination about which the
// table decides, before there is another process: all new connections and sessions are served, and
// leave one record each.
func TestAbsentProcessRefusesNobody(t *testing.T) {
	t.Parallel()
	each := 50
	if full() {
		each = 1000
	}
	lab := netns.NewLab(t, 2)
	for _, b := range lab.Backends {
		b.WitnessTCP(t, 8080)
		b.WitnessUDP(t, 8080)
	}
	p := newProxy(t, lab.Node)
	networks := map[corev1.Protocol]string{corev1.ProtocolTCP: "tcp", corev1.ProtocolUDP: "udp"}
	type kind struct{ network, to string }
	var kinds []kind
	fresh := make(map[kind]bool)   // asked once the process is away
	homes := make(map[kind]string) // of session affinity
	for i, o := range []object{
		{name: "fresh", affinity: true}, // first, as BPF learns some moments later that the process is away
		{name: "local", external: "Local", ranges: []string{lab.Client.IPv4.String() + "/32", lab.Client.IPv6.String() + "/128"}, nodePort: 30080},
		{name: "inside", internal: "Local"},
		{name: "sticky", affinity: true},
	} {
		for protocol, network := range networks {
			o, n := o, 10*i
			o.name, o.protocol, o.port, o.target = o.name+network, protocol, 80, 8080
			if network == "udp" {
				n++
			}
			o.vips = []string{fmt.Sprint("10.96.1.", n), fmt.Sprint("fd00:96::1:", n)}
			to := addresses(o.port, o.vips...)
			if o.nodePort != 0 {
				o.nodePort += uint16(n)
				o.externalIPs = []string{fmt.Sprint("192.0.2.1", n), fmt.Sprint("2001:db8::1:", n)}
				o.lbIPs = []string{fmt.Sprint("192.0.2.2", n), fmt.Sprint("2001:db8::2:", n)}
				to = append(to, addresses(o.port, slices.Concat(o.externalIPs, o.lbIPs)...)...)
				to = append(to, addresses(o.nodePort, lab.Node.IPv4.String(), lab.Node.IPv6.String())...)
			}
			for _, b := range lab.Backends {
				o.endpoints = append(o.endpoints, endpoint{host: b, node: "node"})
			}
			p.put(&o)
			for _, address := range to {
				k := kind{network, address}
				kinds = append(kinds, k)
				if o.affinity {
					homes[k] = ""
				}
				fresh[k] = strings.HasPrefix(o.name, "fresh")
			}
		}
	}
	p.start("--datapath", "kernel", "--access-log-udp", "all")
	// A port of its own for each: with one that another connection of the client has at the endpoint,
	// the process would be asked.
	var port atomic.Uint32
	port.Store(40000)
	visitOnce := func(network string, to netip.AddrPort) (said string) {
		own := netip.AddrPortFrom(netns.Pick([]netip.Addr{lab.Client.IPv4, lab.Client.IPv6}, to.Addr()), uint16(port.Add(1)))
		d := &net.Dialer{Timeout: startTimeout, LocalAddr: net.TCPAddrFromAddrPort(own)}
		if network == "udp" {
			d.LocalAddr = net.UDPAddrFromAddrPort(own)
		}
		conn, err := lab.Client.Dialer(d, network, to.String())
		if err != nil {
			return trouble(err)
		}
		defer conn.Close()
		if network == "udp" {
			said, err = exchange(conn, "hello", startTimeout)
			said, _, _ = strings.Cut(said, "\n")
		} else {
			said, err = netns.AskOn(conn)
		}
		if err != nil {
			return trouble(err)
		}
		return strings.TrimSuffix(said, " "+own.String())
	}
	asked := 0
	ask := func(kinds []kind, times int) {
		t.Helper()
		for _, k := range kinds {
			for _, v := range crowd(times, 8, func(int) (v visit) {
				v.name = visitOnce(k.network, netip.MustParseAddrPort(k.to))
				return v
			}) {
				if v.name != "b1:8080" && v.name != "b2:8080" {
					t.Fatalf("%v: %s", k, v.name)
				}
				if home, sticky := homes[k]; sticky && home != "" && home != v.name {
					t.Fatalf("%v: %s after %s", k, v.name, home) // A5.2
				} else if sticky {
					homes[k] = v.name
				}
			}
			asked += times
		}
	}
	known := slices.DeleteFunc(slices.Clone(kinds), func(k kind) bool { return fresh[k] })
	wait.For(t, "the table decides about each kind", startTimeout, func() error {
		before, err := p.metrics()
		if err != nil {
			return err
		}
		ask(known, 1)
		after, err := p.metrics()
		const decided = "sluice_flows_decided_total"
		if got := after[decided] - before[decided]; err == nil && got < float64(len(known)) {
			err = fmt.Errorf("about %v of %d", got, len(known))
		}
		return err
	})
	before := asked
	p.kill()
	ask(kinds, each)
	next := *p
	next.start("--datapath", "kernel", "--access-log-udp", "all", "--keep-flows", "never")
	next.stop()
	// Lost are the records of what ended in the last moment of the first process.
	clients := make(map[string]int)
	records := next.records()
	for _, r := range records {
		if clients[fmt.Sprint(r.Protocol, r.Client, r.VIP)]++; clients[fmt.Sprint(r.Protocol, r.Client, r.VIP)] > 1 {
			t.Errorf("%s has another record: %+v", r.Client, r)
		}
	}
	if n := len(records); n > asked || n < asked-before {
		t.Errorf("%d records of %d connections and sessions, of which %d began without a process", n, asked, asked-before)
	}
}
