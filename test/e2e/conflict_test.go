package e2e

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// metricConflicts counts the destinations whose ports another program has bound.
const metricConflicts = "sluice_port_conflicts"

// TestPortThatAnotherProgramHoldsIsNotTaken has programs of the node bind one
// Service's node port, and another Service's external IP and port, before the
// proxy starts (A3.15). These programs keep serving. The proxy logs the conflict
// once, shows it as a metric, and serves everything else; it takes the ports when
// they become free, however often the configuration changes.
func TestPortThatAnotherProgramHoldsIsNotTaken(t *testing.T) {
	t.Parallel()
	m := modes[0]
	if m.lacks(nodePort) {
		return
	}
	w := newWorld(t, "tcp", []row{{name: "web", endpoints: "here there"}, {name: "api", endpoints: "here there"}, {name: "busy", endpoints: "here there"}})
	web, api, busy := w.services[0], w.services[1], w.services[2]
	everywhere := w.Node.WitnessTCP(t, web.nodePort)
	var one []*netns.Echo
	for _, to := range api.at(ownExternalIP) {
		one = append(one, w.Node.WitnessTCPAt(t, to.String()))
	}
	p := w.proxy(t, m)
	p.start(decisionFlags("--healthz-bind-address", "127.0.0.1:10256")...)

	held := map[netip.AddrPort]bool{}
	for _, to := range slices.Concat(web.at(nodePort), web.at(otherNodePort), api.at(ownExternalIP)) {
		held[to] = true
	}
	answers := func(held map[netip.AddrPort]bool) error {
		for _, o := range w.services {
			for _, kind := range kinds {
				for _, to := range o.at(kind) {
					if m.lacks(kind) || kind == proxiedIP || to.Addr().IsLoopback() {
						continue
					}
					for _, c := range w.clients {
						got, want := c.dial(to, w.nodeAddrs, startTimeout), "pod-"
						if held[to] {
							want = fmt.Sprintf("node:%d ", to.Port())
						}
						if !strings.HasPrefix(got, want) {
							return fmt.Errorf("%s to %s of %s, %s: %s, want %s", c.name, kind, o.name, to, got, want)
						}
					}
				}
			}
		}
		return nil
	}
	if err := answers(held); err != nil {
		t.Error(err)
	}
	if values, err := p.metrics(); err != nil || values[metricConflicts] < float64(len(held)) {
		t.Errorf("%s is %v, %v, want at least %d", metricConflicts, values[metricConflicts], err, len(held))
	}
	if out, err := w.Node.Command(t, built(t), "status").CombinedOutput(); err == nil || !strings.Contains(string(out), "NOT all is in force") || !strings.Contains(string(out), "are not served") {
		t.Errorf("status beside ports that are not served: %v\n%s", err, out)
	}
	for _, port := range []uint16{web.nodePort, api.port} {
		p.awaitLog(fmt.Sprintf("%d/TCP", port))
	}
	p.healthy(t)
	// A change of the Service does not wait for its port.
	web.endpoints = web.endpoints[:1]
	p.settled(func() { p.put(web) })
	if err := answers(held); err != nil {
		t.Errorf("after a change: %v", err)
	}

	everywhere.Close()
	for _, e := range one {
		e.Close()
	}
	both := busy.endpoints
	wait.For(t, "the ports are served once they are free", startTimeout, func() error {
		busy.endpoints = both[:1+len(both)-len(busy.endpoints)]
		p.put(busy)
		return answers(nil)
	})
	p.awaitMetrics("the metric says so", func(m map[string]float64) bool { return m[metricConflicts] == 0 })
	if out, err := w.Node.Command(t, built(t), "status").CombinedOutput(); err != nil || !strings.Contains(string(out), "all is in force") || !strings.Contains(string(out), "data path") {
		t.Errorf("status once all ports are served: %v\n%s", err, out)
	}
	p.healthy(t)
	// No other program can bind a port that the proxy has bound.
	if l, err := w.Node.Listen("tcp", web.at(nodePort)[0].String()); err == nil {
		l.Close()
		t.Error("another program could take a node port that is served")
	}
	p.stop()
	check.Equalf(t, strings.Count(p.stderr.String(), "is not served"), 2, "how often the log says that a port is not served")
}

// healthy expects /healthz and /livez to answer 200.
func (p *proxy) healthy(t *testing.T) {
	t.Helper()
	client := p.scraper()
	defer client.CloseIdleConnections()
	for _, path := range []string{"/healthz", "/livez"} {
		r, err := client.Get("http://127.0.0.1:10256" + path)
		if err != nil {
			t.Error(err)
			continue
		}
		r.Body.Close()
		check.Equalf(t, r.StatusCode, http.StatusOK, "%s answers %s", path, r.Status)
	}
}
