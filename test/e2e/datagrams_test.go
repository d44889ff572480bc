package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// largestDatagram is the maximum payload of UDP over IPv4.
const largestDatagram = 65507

// wholeOnLoopback is the maximum that fits one IPv6 packet on lo, whose MTU is
// 65,536.
const wholeOnLoopback = 65536 - 40 - 8

// unfragmented fits one Ethernet packet.
const unfragmented = 1400

// reflector sends each datagram back unchanged, until the test ends.
func reflector(t *testing.T, h *netns.Host, port uint16) {
	t.Helper()
	pc := must.Get(h.ListenPacket("udp", fmt.Sprintf(":%d", port)))(t)
	done := make(chan struct{})
	t.Cleanup(func() {
		_ = pc.Close()
		<-done
	})
	go func() {
		defer close(done)
		buf := make([]byte, 65536)
		for {
			n, from, err := pc.ReadFrom(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				_, _ = pc.WriteTo(buf[:n], from)
			}
		}
	}()
}

// TestPromise3_DatagramsKeepTheirBoundariesAndSizes sends datagrams of all sizes,
// among them empty and largest ones, to each kind of destination. Each one must
// come back unchanged and on its own.
func TestPromise3_DatagramsKeepTheirBoundariesAndSizes(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		if m.lacks(datagrams) {
			return
		}
		w := newWorld(t, "udp", []row{{name: "web", endpoints: "here there"}})
		o := w.services[0]
		o.target = 9000
		for _, h := range []*netns.Host{w.Pods[0], w.Remote[0]} {
			reflector(t, h, o.target)
		}
		p := w.proxy(t, m)
		p.start(decisionFlags()...)
		sizes := []int{0, 1, 2, 1471, 1472, 1473, 4096, 8192, 9001, 32768, 65000, wholeOnLoopback, largestDatagram}
		r := rand.New(rand.NewPCG(8, 3))
		for range 20 {
			sizes = append(sizes, r.IntN(largestDatagram+1))
		}
		sessions := 0
		for _, kind := range kinds {
			if m.lacks(kind) || kind == proxiedIP {
				continue
			}
			for _, to := range o.at(kind) {
				for _, c := range w.clients {
					if to.Addr() == netip.IPv6Loopback() || to.Addr().IsLoopback() && c.name != "node" {
						continue
					}
					sessions++
					sizes := sizes
					switch {
					case m.lacks(fragments):
						sizes = slices.DeleteFunc(slices.Clone(sizes), func(n int) bool { return n > unfragmented })
					case m.lacks(ownFragments) && c.name == "node" && to.Addr().Is6():
						sizes = slices.DeleteFunc(slices.Clone(sizes), func(n int) bool { return n > wholeOnLoopback })
					}
					check.OKf(t, w.reflected(c, to, sizes), "%s to %s %s", c.name, kind, to)
				}
			}
		}
		p.stop()
		records := p.records()
		check.Equalf(t, len(records), sessions, "records of %d sessions", sessions)
		index(t, records)
	})
}

// reflected sends datagrams one after the other, and expects each of them back.
func (w *world) reflected(c client, to netip.AddrPort, sizes []int) error {
	conn, err := c.Dialer(c.dialer("udp", to, startTimeout), "udp", to.String())
	if err != nil {
		return err
	}
	defer conn.Close()
	buf := make([]byte, 65536)
	for i, size := range sizes {
		sent := bytes.Repeat([]byte{byte(i + 1)}, size)
		if _, err := conn.Write(sent); err != nil {
			return fmt.Errorf("%d bytes: %w", size, err)
		}
		_ = conn.SetReadDeadline(time.Now().Add(startTimeout))
		n, err := conn.Read(buf)
		if err != nil {
			return fmt.Errorf("%d bytes: %w", size, err)
		}
		if !bytes.Equal(buf[:n], sent) {
			return fmt.Errorf("%d bytes came back as %d, or others", size, n)
		}
	}
	return nil
}

// TestSessionsFollowTheirEndpoints removes endpoints from one client's UDP socket.
// The client notices nothing.
func TestSessionsFollowTheirEndpoints(t *testing.T) {
	m := modes[0]
	if m.lacks(datagrams) {
		return
	}
	w := newWorld(t, "udp", []row{{name: "web", endpoints: "here there"}})
	o := w.services[0]
	p := w.proxy(t, m)
	p.start(decisionFlags()...)
	for _, kind := range []string{clusterIP, nodePort, loadBalancerIP} {
		if m.lacks(kind) {
			continue
		}
		for _, to := range o.at(kind) {
			t.Run(kind+" "+to.String(), func(t *testing.T) { w.follow(t, p, o, to) })
		}
	}
	p.stop()
}

func (w *world) follow(t *testing.T, p *proxy, o *object, to netip.AddrPort) {
	c := w.clients[2]
	conn := must.Get(c.Dialer(c.dialer("udp", to, startTimeout), "udp", to.String()))(t)
	defer conn.Close()
	// Nothing may be lost where an answer is expected, so ask does not ask again there.
	ask := func(patience time.Duration) (string, error) {
		said, err := exchange(conn, "hello", patience)
		server, _, _ := strings.Cut(said, " ")
		return server, err
	}
	here, there := o.endpoints[0], o.endpoints[1]
	name := func(e endpoint) string { return fmt.Sprintf("%s:%d", e.host.Name(), o.target) }
	changed := *o
	put := func(list ...endpoint) {
		t.Helper()
		changed.endpoints = list
		p.settled(func() { p.put(&changed) })
	}
	want := func(when string, e endpoint) {
		t.Helper()
		for range 4 { // all of them by the same endpoint (A8.9)
			if got, err := ask(startTimeout); err != nil || got != name(e) {
				t.Errorf("%s: got %q, %v, want %s", when, got, err, name(e))
			}
		}
	}
	first := must.Get(ask(startTimeout))(t)
	one, other := here, there
	if first != name(here) {
		one, other = there, here
	}
	want("at first", one)
	// An endpoint that still serves keeps its sessions (A8.3).
	leaving := one
	leaving.state = terminating
	put(leaving, other)
	want("while its endpoint terminates", one)
	// The session of a removed endpoint is closed, and the next datagram goes to
	// another one (A8.2).
	put(other)
	want("after its endpoint has gone", other)
	put()
	wait.For(t, "it is refused", startTimeout, func() error {
		if got, err := ask(silence); err == nil {
			return errorText(got)
		} else if trouble(err) != "refused" {
			return err
		}
		return nil
	})
	// The first endpoint after none gets the same client socket (A8.6).
	put(one)
	wait.For(t, "it is served again", startTimeout, func() error {
		got, err := ask(silence)
		if err == nil && got != name(one) {
			err = errorText(got)
		}
		return err
	})
	want("after there was none", one)
	put(here, there)
}

// TestTCPAndUDPOnOnePort has a TCP and a UDP Service on the same addresses and
// ports, as DNS has.
func TestTCPAndUDPOnOnePort(t *testing.T) {
	t.Parallel()
	m := modes[0]
	if m.lacks(datagrams) {
		return
	}
	w := newWorld(t, "tcp", []row{{name: "web", endpoints: "here there"}})
	o := w.services[0]
	udp := *o
	udp.name, udp.protocol = "web-udp", corev1.ProtocolUDP
	udp.vips = []string{"10.96.0.99", "fd00:96::99"}
	udp.target = 9000
	for _, h := range []*netns.Host{w.Pods[0], w.Remote[0]} {
		h.WitnessUDP(t, udp.target)
	}
	p := w.proxy(t, m)
	p.put(&udp)
	p.start(decisionFlags()...)
	for _, kind := range kinds {
		if m.lacks(kind) || kind == proxiedIP || kind == loopbackPort || kind == clusterIP {
			continue
		}
		for _, to := range o.at(kind) {
			for _, c := range w.clients {
				for network, port := range map[string]uint16{"tcp": o.target, "udp": udp.target} {
					_, got := c.visit(network, to, w.nodeAddrs, startTimeout)
					if server, _, _ := strings.Cut(got, " "); !strings.HasPrefix(server, "pod-") || !strings.HasSuffix(server, fmt.Sprintf(":%d", port)) {
						t.Errorf("%s to %s %s by %s: %s, want port %d", c.name, kind, to, network, got, port)
					}
				}
			}
		}
	}
	p.stop()
}
