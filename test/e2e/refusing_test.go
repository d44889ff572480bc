package e2e

import (
	"io"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestPromise1_RestartOfTheOnlyEndpointFailsNoConnection closes the only
// endpoint's port until it has refused each client four times, and opens it again.
func TestPromise1_RestartOfTheOnlyEndpointFailsNoConnection(t *testing.T) {
	const clients, refusals = 20, 4
	lab := netns.NewLab(t, 1)
	web := webOn(lab)
	sticky := web
	sticky.name, sticky.vips, sticky.affinity = "sticky", []string{"10.96.0.11", "fd00:96::11"}, 60
	p := startProxy(t, lab, []webService{web, sticky})
	targets := slices.Concat(addresses(80, web.vips...), addresses(80, sticky.vips...))
	visits := make(chan visit, clients)
	for i := range clients {
		go func() { visits <- ask(lab.Client, targets[i%len(targets)]) }()
	}
	p.awaitMetrics("the attempts are refused", func(m map[string]float64) bool { return m["sluice_dial_failures_total"] >= clients*refusals })
	lab.Backends[0].EchoTCP(t, 8080)
	for range clients {
		if v := <-visits; v.err != nil {
			t.Errorf("%s: %v", v.client, v.err)
		}
	}
	p.stop()
}

// TestServiceWhoseEndpointsRefuseResetsClients expects the reset after the retry
// plan's time, not earlier, and not later by much.
func TestServiceWhoseEndpointsRefuseResetsClients(t *testing.T) {
	lab := netns.NewLab(t, 2)
	p := startProxy(t, lab, []webService{webOn(lab)}, promptDials)
	targets := addresses(80, vip4, vip6)
	for _, v := range crowd(4, 4, func(i int) visit { return ask(lab.Client, targets[i%2]) }) {
		if !isReset(v.err) || v.elapsed < allTimeouts-200*time.Millisecond {
			t.Errorf("%s: %v after %v, want a reset after %v", v.client, v.err, v.elapsed, allTimeouts)
		}
	}
	p.stop()
	for _, r := range p.wantEnds(t, slices.Repeat([]string{"connect_failed"}, 4)...) {
		// Ten, and one at once after each of four that a busy machine answers so late that they count as timed out.
		if r.Attempts > 14 || time.Duration(r.DurationUS)*time.Microsecond > 2*allTimeouts {
			t.Errorf("%d attempts in %d us", r.Attempts, r.DurationUS)
		}
	}
}

// TestPromise1_DroppingEndpointDelaysFewConnections connects repeatedly to a Service
// of two endpoints, one of which drops.
func TestPromise1_DroppingEndpointDelaysFewConnections(t *testing.T) {
	const connections = 200
	lab := netns.NewLab(t, 2)
	lab.Backends[0].EchoTCP(t, 8080)
	swallow(t, lab.Backends[1], 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, promptDials)
	target := addresses(80, vip4)[0]
	start := time.Now()
	for range connections {
		if v := ask(lab.Client, target); v.err != nil {
			t.Fatal(v.err)
		}
	}
	took := time.Since(start)
	p.stop()
	delayed := 0
	for _, r := range p.records() {
		for _, a := range r.Failed {
			if a.Endpoint.Addr() == lab.Backends[1].IPv4 { // a busy machine may make the other one late, too
				delayed++
				break
			}
		}
	}
	t.Logf("%d of %d connections in %v met the endpoint that drops", delayed, connections, took)
	// Once at first, and then after periods that double from half a second.
	if most := 3 + int(took/time.Second); delayed < 1 || delayed > most {
		t.Errorf("%d of %d connections in %v met the endpoint that drops, want 1 to %d", delayed, connections, took, most)
	}
}

// refusing returns a service with n endpoints whose ports are closed.
func refusing(t *testing.T, lab *netns.Lab, n int) webService {
	t.Helper()
	pods := netip.MustParsePrefix("10.200.0.0/16")
	host := lab.Backends[0]
	must.OK(t, host.AddLocalRoute(pods))
	must.OK(t, lab.Node.AddRoute(pods, host.IPv4))
	s := webService{name: "refusing", vips: []string{vip4}, port: 80}
	for a := pods.Addr().Next(); len(s.endpoints) < n; a = a.Next() {
		s.endpoints = append(s.endpoints, netip.AddrPortFrom(a, 9))
	}
	return s
}

// TestPromise8_RefusingServiceSlowsNoOther connects a hundred times a second to a
// Service with a thousand endpoints that all refuse (a wrong targetPort). It compares
// connections to another Service with direct connections to the same server,
// alternating, so that both meet the same load of the machine. They take 2 times as
// long, and two seconds if each refused attempt holds its event loop for 40 ms.
func TestPromise8_RefusingServiceSlowsNoOther(t *testing.T) {
	const endpoints = 1000
	flood, each := 200, 10*time.Millisecond
	if full() {
		flood = 1000
	}
	lab := netns.NewLab(t, 2)
	lab.Backends[1].EchoTCP(t, 8080)
	live := webService{name: "live", vips: []string{"10.96.0.11"}, port: 80, endpoints: on(8080, lab.Backends[1])}
	p := startProxy(t, lab, []webService{refusing(t, lab, endpoints), live}, promptDials)
	target, dead := addresses(80, live.vips...)[0], addresses(80, vip4)[0]
	past := addresses(8080, lab.Backends[1].IPv4.String())[0]

	floods, began := 0, time.Now()
	checkBearable(t, 10, func() (quiet, beside time.Duration) {
		floods++
		over := make(chan bool, 1)
		go func() {
			var wg sync.WaitGroup
			clock := time.NewTicker(each)
			defer clock.Stop()
			for range flood {
				<-clock.C
				wg.Go(func() {
					if c, err := lab.Client.Dial("tcp", dead); err == nil {
						_, _ = io.Copy(io.Discard, c)
						c.Close()
					}
				})
			}
			wg.Wait()
			over <- true
		}()
		return alternate(t, lab.Client, []string{past}, []string{target}, func(int) bool { return len(over) > 0 })
	})
	m := must.Get(p.metrics())(t)
	attempts, took := m["sluice_dial_failures_total"], time.Since(began)
	flood *= floods
	t.Logf("%.0f attempts for %d connections that were refused", attempts, flood)
	// Nine for each connection, and those that find each endpoint closed again,
	// after periods that double from half a second to 16 s.
	periods := 6 + int(took/(16*time.Second))
	if most := float64(9*flood + periods*endpoints); attempts > most {
		t.Errorf("%.0f attempts for %d connections, want at most %.0f", attempts, flood, most)
	}
	p.stop()
}
