package e2e

import (
	"fmt"
	"net"
	"net/netip"
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
	p, vips := newProxy(t, lab.Node), [][]string{{vip4, vip6}, {"10.96.0.53", "fd00:96::53"}}
	for i, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		p.put(&object{
			name: []string{"web", "dns"}[i], protocol: protocol, port: 80, nodePort: uint16(30080 + i), target: 8080,
			vips: vips[i], external: "Local",
			externalIPs: []string{"192.0.2.10", "2001:db8::10"}, lbIPs: []string{"192.0.2.20", "2001:db8::20"},
			ranges:    []string{lab.Client.IPv4.String() + "/32", lab.Client.IPv6.String() + "/128"},
			endpoints: []endpoint{{host: lab.Backends[0], node: "node"}, {host: lab.Backends[1], node: "node"}},
		})
	}
	sticky := []string{"10.96.0.77", "fd00:96::77"}
	for i, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		p.put(&object{
			name: []string{"sticky", "sticky-dns"}[i], protocol: protocol, port: uint16(81 + i), target: 8080, vips: sticky, affinity: true,
			endpoints: []endpoint{{host: lab.Backends[0], node: "node"}, {host: lab.Backends[1], node: "node"}},
		})
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
	type kind struct{ network, to string }
	var kinds []kind
	for i, network := range []string{"tcp", "udp"} {
		to := append(addresses(80, vips[i]...), addresses(80, "192.0.2.10", "2001:db8::10", "192.0.2.20", "2001:db8::20")...)
		for _, address := range append(to, addresses(uint16(30080+i), lab.Node.IPv4.String(), lab.Node.IPv6.String())...) {
			kinds = append(kinds, kind{network, address})
		}
	}
	homes := make(map[kind]string) // of session affinity
	for i, network := range []string{"tcp", "udp"} {
		for _, address := range addresses(uint16(81+i), sticky...) {
			kinds = append(kinds, kind{network, address})
			homes[kinds[len(kinds)-1]] = ""
		}
	}
	asked := 0
	ask := func(times int) {
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
	wait.For(t, "the table decides about each kind", startTimeout, func() error {
		before, err := p.metrics()
		if err != nil {
			return err
		}
		ask(1)
		after, err := p.metrics()
		const decided = "sluice_flows_decided_total"
		if got := after[decided] - before[decided]; err == nil && got < float64(len(kinds)) {
			err = fmt.Errorf("about %v of %d", got, len(kinds))
		}
		return err
	})
	before := asked
	p.kill()
	ask(each)
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
