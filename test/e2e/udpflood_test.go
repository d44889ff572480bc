package e2e

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// spoofed is the range of source addresses of a flood.
var spoofed = netip.MustParsePrefix("172.16.0.0/12")

// flood sends datagrams to one destination, each from its own unused address and
// port. It sends n of them, up to 20,000 a second, so that the queues between the
// namespaces, which all traffic shares, do not overflow; fewer to a proxy that the
// race detector slows, which would need all of a CPU for them.
func flood(h *netns.Host, to netip.AddrPort, n int) error {
	var fd int
	err := h.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	})
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	const payload = "flood"
	p := make([]byte, 28+len(payload))
	p[0], p[8], p[9] = 4<<4|5, 64, unix.IPPROTO_UDP
	copy(p[16:], to.Addr().AsSlice())
	binary.BigEndian.PutUint16(p[22:], to.Port())
	binary.BigEndian.PutUint16(p[24:], uint16(8+len(payload))) // without a checksum, which IPv4 allows
	copy(p[28:], payload)
	address := &unix.SockaddrInet4{Addr: to.Addr().As4()}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	first, each := spoofed.Addr().As4(), 20
	if instrumented {
		each = 4
	}
	for sent := 0; sent < n; {
		<-tick.C
		for range each {
			source := binary.BigEndian.Uint32(first[:]) + 1 + uint32(sent)%(1<<20-2)
			binary.BigEndian.PutUint32(p[12:], source)
			binary.BigEndian.PutUint16(p[20:], uint16(1024+sent%60000))
			if err := unix.Sendto(fd, p, 0, address); err != nil && err != unix.ENOBUFS {
				return err
			}
			sent++
		}
	}
	return nil
}

// TestPromise8_FloodOfDatagramsSlowsNoOther floods one service from addresses
// that do not exist. The sessions and the memory must stay bounded. A client of
// another service must lose nothing, and its requests must not take much longer
// than between the floods.
func TestPromise8_FloodOfDatagramsSlowsNoOther(t *testing.T) {
	const bound = 512 // sessions
	datagrams, phases := 10000, 5
	if full() {
		datagrams, phases = 1000000, 9
	}
	lab := netns.NewLab(t, 2)
	must.OK(t, lab.Node.AddRoute(spoofed, lab.Client.IPv4))
	p := newProxy(t, lab.Node)
	for i, name := range []string{"flooded", "neighbour"} {
		lab.Backends[i].EchoUDP(t, 9000)
		p.put(&object{
			name: name, kind: corev1.ServiceTypeClusterIP, vips: []string{fmt.Sprintf("10.96.0.%d", 10+i)}, port: 1000, target: 9000,
			protocol: corev1.ProtocolUDP, endpoints: []endpoint{{host: lab.Backends[i], node: "elsewhere"}},
		})
	}
	p.start("--max-udp-sessions", strconv.Itoa(bound), "--access-log-udp", "off")
	dial := func(to netip.AddrPort) net.Conn {
		return lab.Client.Connect(t, "udp", to.String())
	}
	flooded := netip.MustParseAddrPort("10.96.0.10:1000")
	var behind, neighbours []net.Conn // enough that each event loop has one of both
	for range 8 {
		behind = append(behind, dial(flooded))
		neighbours = append(neighbours, dial(netip.MustParseAddrPort("10.96.0.11:1000")))
	}

	memory := p.memory()
	most := 0.0
	var quiet, beside, quietTail, besideTail []time.Duration
	for range phases {
		requests := 0
		times := requestTimes(t, neighbours, func() bool { requests++; return requests > 500 })
		quiet, quietTail = append(quiet, percentile(times, 90)), append(quietTail, percentile(times, 99))

		flooding := make(chan error, 1)
		go func() { flooding <- flood(lab.Client, flooded, datagrams/phases) }()
		times = requestTimes(t, neighbours, func() bool { return len(flooding) > 0 })
		must.OK(t, <-flooding)
		beside, besideTail = append(beside, percentile(times, 90)), append(besideTail, percentile(times, 99))
		// An answer shows that the proxy has received everything that was sent
		// before.
		for _, last := range behind {
			wait.For(t, "the flood has been taken", startTimeout, func() error {
				_, err := exchange(last, "last", 100*time.Millisecond)
				return err
			})
		}
		m := must.Get(p.metrics())(t)
		most = max(most, m["sluice_udp_sessions"]+m["sluice_flows"])
	}
	grown := p.memory() - memory
	t.Logf("%d datagrams; at most %.0f sessions; memory was %d KiB and grew by %d KiB", datagrams, most, memory>>10, grown>>10)
	for _, c := range []struct {
		name          string
		quiet, beside []time.Duration
		most          time.Duration
	}{{"p90", quiet, beside, 50 * time.Millisecond}, {"p99", quietTail, besideTail, mostTail}} {
		slices.Sort(c.quiet)
		slices.Sort(c.beside)
		q, b := percentile(c.quiet, 50), percentile(c.beside, 50)
		t.Logf("the neighbour's requests, median %s of %d phases: %v, during the floods %v: %.1f times", c.name, phases, q, b, float64(b)/float64(q))
		if !bearable(q, b, c.most, 50) { // it is about 2 times
			t.Errorf("the neighbour's %s is %v during the floods and %v between them", c.name, b, q)
		}
	}
	if most < bound/2 {
		t.Errorf("%.0f sessions; the flood has not filled its bound of %d", most, bound)
	}
	if most > bound+8 { // each loop rounds its share up
		t.Errorf("%.0f sessions, the bound is %d", most, bound)
	}
	// The memory of a session and of the datagrams that it keeps; the race
	// detector needs several times that.
	if allowed := 64 << 20; grown > allowed {
		t.Errorf("memory grew by %d bytes", grown)
	}
	p.stop()
}

// requestTimes sends requests by turns, one after the other, until enough is true, and
// expects each to be answered without a repetition. It returns their durations,
// sorted.
func requestTimes(t *testing.T, conns []net.Conn, enough func() bool) (took []time.Duration) {
	t.Helper()
	for i := 0; i == 0 || !enough(); i++ {
		text := strconv.Itoa(i)
		began := time.Now()
		said, err := exchange(conns[i%len(conns)], text, startTimeout)
		must.OKf(t, err, "request %d", i)
		if len(said) < len(text) || said[len(said)-len(text):] != text {
			t.Fatalf("request %d was answered by %q", i, said)
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took
}

func percentile(sorted []time.Duration, p int) time.Duration {
	return sorted[min(len(sorted)*p/100, len(sorted)-1)]
}
