package e2e

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// deluge sends first packets to one Service, each from its own address and port, until it
// is stopped: up to 40,000 a second. Nobody goes on with a handshake.
func (c *packetClients) deluge(network string, to netip.AddrPort, stop <-chan struct{}) (sent int) {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	first := binary.BigEndian.Uint32(memberRange.Addr().AsSlice()) + 1<<20
	for {
		select {
		case <-stop:
			return sent
		case <-tick.C:
		}
		for range perTick() {
			var b [4]byte
			binary.BigEndian.PutUint32(b[:], first+uint32(c.flooded)%(1<<20))
			from := netip.AddrPortFrom(netip.AddrFrom4(b), uint16(1024+c.flooded%60000))
			p := (&segment{from: from, to: to, sequence: firstSequence, flags: flagSYN}).packet()
			if network == "udp" {
				p = datagram(from, to, "flood")
			}
			if _, err := c.clients.Write(p); err == nil {
				sent++
			}
			c.flooded++
		}
	}
}

// perTick is how many packets of a deluge come in each millisecond. The race detector makes
// the proxy ten times slower.
func perTick() int {
	if instrumented {
		return 4
	}
	return 40
}

// datagram is an IPv4 packet with a UDP datagram.
func datagram(from, to netip.AddrPort, payload string) []byte {
	length := 28 + len(payload)
	b := append(make([]byte, 0, length), 0x45, 0, byte(length>>8), byte(length), 0, 0, 0x40, 0, 64, 17, 0, 0)
	b = append(b, from.Addr().AsSlice()...)
	b = append(b, to.Addr().AsSlice()...)
	binary.BigEndian.PutUint16(b[10:], ^onesSum(0, b))
	b = binary.BigEndian.AppendUint16(b, from.Port())
	b = binary.BigEndian.AppendUint16(b, to.Port())
	b = binary.BigEndian.AppendUint16(b, uint16(length-20))
	b = append(append(b, 0, 0), payload...)
	binary.BigEndian.PutUint16(b[26:], ^onesSum(uint32(17+length-20), b[12:]))
	return b
}

// TestPromise8_FloodOfForwardedClientsSlowsNoOther floods one Service with SYNs, or with
// datagrams of ever new clients, whose packets the kernel forwards. Connections to a
// neighbour must take as long as between the floods, and stay the kernel's. Nothing may
// grow without bound.
func TestPromise8_FloodOfForwardedClientsSlowsNoOther(t *testing.T) {
	const (
		flows    = 4096
		requests = 100 // of the neighbour's clients, in each phase
	)
	for _, network := range []string{"tcp", "udp"} {
		t.Run(network, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			c := newPacketClients(t, lab.Node, 0, netip.Addr{})
			p := newProxy(t, lab.Node)
			p.apply(webService{name: "neighbour", vips: []string{vip4}, port: 80, endpoints: on(8080, lab.Backends[0])[:1]})
			victim := webService{name: "flooded", vips: []string{"10.96.0.66"}, port: 80, endpoints: endpointsOf(1)}
			p.write("flooded.yaml", strings.ReplaceAll(victim.yaml(), "protocol: TCP", "protocol: "+strings.ToUpper(network)))
			p.start("--datapath", "kernel", "--max-flows", fmt.Sprint(flows), "--access-log-udp", "off")
			flooded := netip.MustParseAddrPort("10.96.0.66:80")
			phase := func() (p50, p99 time.Duration) {
				t.Helper()
				var times []time.Duration
				for range requests {
					v := ask(lab.Client, addresses(80, vip4)[0])
					if v.err != nil {
						t.Fatal(v.err)
					}
					times = append(times, v.elapsed)
				}
				slices.Sort(times)
				return percentile(times, 50), percentile(times, 99)
			}
			phase()
			var quiet, beside [2][]time.Duration // medians, and 99th percentiles
			memory, most, sent := p.memory(), 0.0, 0
			for range 5 {
				q50, q99 := phase()
				stop, done := make(chan struct{}), make(chan int)
				go func() { done <- c.deluge(network, flooded, stop) }()
				f50, f99 := phase()
				m := must.Get(p.metrics())(t)
				most = max(most, m["sluice_flows"])
				close(stop)
				sent += <-done
				quiet[0], quiet[1] = append(quiet[0], q50), append(quiet[1], q99)
				beside[0], beside[1] = append(beside[0], f50), append(beside[1], f99)
				t.Logf("quiet: p50 %v, p99 %v; flooded: p50 %v, p99 %v; %v flows", q50, q99, f50, f99, m["sluice_flows"])
			}
			stop, done := make(chan struct{}), make(chan int)
			go func() { done <- c.deluge(network, flooded, stop) }()
			var m map[string]float64
			wait.For(t, "the flood passes its bound", startTimeout, func() (err error) { // a busy machine sends less of it
				if m, err = p.metrics(); err == nil && m["sluice_flows_passed_total"] == 0 {
					err = fmt.Errorf("%v flows are open", m["sluice_flows"])
				}
				return err
			})
			close(stop)
			sent += <-done
			most = max(most, m["sluice_flows"])
			grown := p.memory() - memory
			t.Logf("%d first packets; at most %v flows; %v packets passed to the relay; memory grew by %d KiB",
				sent, most, m["sluice_flows_passed_total"], grown>>10)
			for i, most := range []time.Duration{mostWait, mostTail} { // on a quiet machine p99 is 1.5 times
				slices.Sort(quiet[i])
				slices.Sort(beside[i])
				q, b := percentile(quiet[i], 50), percentile(beside[i], 50)
				t.Logf("medians of the phases' %s: %v, flooded %v", []string{"p50", "p99"}[i], q, b)
				if !bearable(q, b, most, []int{10, 100}[i]) {
					t.Errorf("the neighbour's %s is %v in the floods and %v between them", []string{"p50", "p99"}[i], b, q)
				}
			}
			if most > flows-flows/8+11*requests { // the phases above, and the first one
				t.Errorf("%v flows were open", most)
			}
			if grown > 64<<20 && !instrumented {
				t.Errorf("memory grew by %d MiB", grown>>20)
			}
			p.stop()
			for _, r := range p.records() {
				if r.Service == "default/neighbour:http" && r.Path != "kernel" {
					t.Fatalf("a connection of the neighbour was relayed: %+v", r)
				}
			}
		})
	}
}
