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

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// spoofed is the range of addresses that a flood comes from.
var spoofed = netip.MustParsePrefix("172.16.0.0/12")

// flood sends datagrams to one destination, each from an address and a port of
// its own that nobody has. It goes on until n are sent or stop is closed, and
// gives how many were; it sends up to 20,000 a second, so that the queues
// between the namespaces, which all traffic shares, do not overflow.
func flood(h *netns.Host, to netip.AddrPort, n int, stop chan struct{}) (sent int, err error) {
	var fd int
	err = h.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_RAW)
		return err
	})
	if err != nil {
		return 0, err
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
	first := spoofed.Addr().As4()
	for sent < n {
		select {
		case <-stop:
			return sent, nil
		case <-tick.C:
		}
		for range 20 {
			source := binary.BigEndian.Uint32(first[:]) + 1 + uint32(sent)%(1<<20-2)
			binary.BigEndian.PutUint32(p[12:], source)
			binary.BigEndian.PutUint16(p[20:], uint16(1024+sent%60000))
			if err := unix.Sendto(fd, p, 0, address); err != nil && err != unix.ENOBUFS {
				return sent, err
			}
			sent++
		}
	}
	return sent, nil
}

// TestPromise8_FloodOfDatagramsStaysItsServices floods one service from
// addresses that do not exist. The sessions stay within their bound, and so does
// memory; a client of another service loses nothing.
func TestPromise8_FloodOfDatagramsStaysItsServices(t *testing.T) {
	const bound = 512 // sessions
	datagrams, requests := 20000, 300
	if full() {
		datagrams, requests = 1000000, 10000
	}
	lab := netns.NewLab(t, 2)
	if err := lab.Node.AddRoute(spoofed, lab.Client.IPv4); err != nil {
		t.Fatal(err)
	}
	p := newProxy(t, lab.Node)
	for i, name := range []string{"flooded", "neighbour"} {
		lab.Backends[i].EchoUDP(t, 9000)
		p.put(&object{
			name: name, kind: corev1.ServiceTypeClusterIP, vips: []string{fmt.Sprintf("10.96.0.%d", 10+i)}, port: 1000, target: 9000,
			protocol: corev1.ProtocolUDP, endpoints: []endpoint{{host: lab.Backends[i], node: "elsewhere"}},
		})
	}
	p.start("--max-udp-sessions", strconv.Itoa(bound), "--access-log-udp", "off")
	flooded, neighbour := netip.MustParseAddrPort("10.96.0.10:1000"), netip.MustParseAddrPort("10.96.0.11:1000")
	conn, err := lab.Client.Dial("udp", neighbour.String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()

	quiet := requestTimes(t, conn, requests, nil)
	memory := p.memory()
	stop, flooding := make(chan struct{}), make(chan error, 1)
	var sent int
	go func() {
		var err error
		sent, err = flood(lab.Client, flooded, datagrams, stop)
		flooding <- err
	}()
	most := 0.0
	beside := requestTimes(t, conn, requests, func(i int) {
		if i%100 != 0 {
			return
		}
		m, err := p.metrics()
		if err != nil {
			t.Fatal(err)
		}
		most = max(most, m["sluice_udp_sessions"])
	})
	if full() {
		close(stop)
	}
	if err := <-flooding; err != nil {
		t.Fatal(err)
	}
	wait.For(t, "the flood has arrived", startTimeout, func() error {
		m, err := p.metrics()
		if err == nil && m["sluice_udp_sessions"] < bound/2 {
			err = errNotYet
		}
		most = max(most, m["sluice_udp_sessions"])
		return err
	})
	grown := p.memory() - memory
	t.Logf("%d datagrams; at most %.0f sessions; memory was %d KiB and grew by %d KiB", sent, most, memory>>10, grown>>10)
	t.Logf("the neighbour's requests: p50 %v, p99 %v; during the flood p50 %v, p99 %v: %.1f times",
		percentile(quiet, 50), percentile(quiet, 99), percentile(beside, 50), percentile(beside, 99),
		float64(percentile(beside, 99))/float64(percentile(quiet, 99)))
	if most > bound+8 { // each loop rounds its share up
		t.Errorf("%.0f sessions, the bound is %d", most, bound)
	}
	// A session and what is kept of its datagrams; the race detector takes
	// several times of that.
	if allowed := 64 << 20; grown > allowed {
		t.Errorf("memory grew by %d bytes", grown)
	}
	p.stop()
}

// requestTimes sends requests, one after the other, and wants each answered
// without being repeated. It gives how long they took, sorted.
func requestTimes(t *testing.T, conn net.Conn, n int, before func(i int)) []time.Duration {
	t.Helper()
	took := make([]time.Duration, n)
	for i := range took {
		if before != nil {
			before(i)
		}
		text := strconv.Itoa(i)
		began := time.Now()
		said, err := exchange(conn, text, startTimeout)
		if err != nil {
			t.Fatalf("request %d: %v", i, err)
		}
		if len(said) < len(text) || said[len(said)-len(text):] != text {
			t.Fatalf("request %d was answered by %q", i, said)
		}
		took[i] = time.Since(began)
	}
	slices.Sort(took)
	return took
}

func percentile(sorted []time.Duration, p int) time.Duration {
	return sorted[min(len(sorted)*p/100, len(sorted)-1)]
}
