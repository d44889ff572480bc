package e2e

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netpolicy"
	"github.com/sluice-proxy/sluice/test/wait"
)

// policyWorld has a Service for each case of a policy.
func policyWorld(t *testing.T) *world {
	var rows []row
	for i := range netpolicy.Services() {
		rows = append(rows, row{name: fmt.Sprintf("here-%d", i), endpoints: "here"})
	}
	return newWorld(t, "tcp", rows)
}

// reached reports whether the client reaches the endpoint of a Service. It waits longer for
// an answer that is expected.
func (w *world) reached(service int, expected bool) bool {
	patience := silence
	if expected {
		patience = wait.Patience
	}
	return strings.HasPrefix(w.clients[0].dial(w.services[service].at(clusterIP)[0], w.nodeAddrs, patience), "pod-1")
}

// TestNetworkPolicies plays rules of network policies against each data path, and compares
// the results with the table in docs/network-policy.md. The test of that name in
// test/cluster plays them against the real kube-proxy.
func TestNetworkPolicies(t *testing.T) {
	t.Parallel()
	for path, flags := range map[string][]string{
		"relay, bypass": {"--datapath", "relay", "--conntrack", "bypass"},
		"relay, keep":   {"--datapath", "relay", "--conntrack", "keep"},
		"kernel flows":  {"--datapath", "kernel"},
	} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			w := policyWorld(t)
			w.proxy(t, modes[0]).start(decisionFlags(flags...)...)
			netpolicy.Play(t, w.Node, path, w.reached)
		})
	}
}

// TestConnectionTrackingIsKept in each steering mode as docs/network-policy.md says: an
// endpoint that may only answer is reached.
func TestConnectionTrackingIsKept(t *testing.T) {
	t.Parallel()
	documented := trackingTable(t)
	nothing := netpolicy.Cases[len(netpolicy.Cases)-1]
	for _, m := range modes {
		for _, choice := range []string{"bypass", "keep", "auto"} {
			t.Run(m.name+"/"+choice, func(t *testing.T) {
				t.Parallel()
				w := policyWorld(t)
				p := w.proxy(t, m)
				p.start(decisionFlags("--conntrack", choice)...)
				for i, s := range netpolicy.Styles {
					if !w.reached(2*i, true) {
						t.Fatal("without rules, the endpoint is not reached")
					}
					unload := s.Load(t, w.Node, nothing)
					if choice == "auto" && !m.lacks(untracked) {
						wait.Until(t, "the rules are noticed", startTimeout, func() bool { return p.stderr.Contains("connections to endpoints are kept in connection tracking") })
					}
					got, want := "fails", documented[m.name][choice]
					if w.reached(2*i+1, want == "holds") {
						got = "holds"
					}
					check.Equalf(t, got, want, "%s, as docs/network-policy.md says", s.Name)
					unload()
				}
				if says := p.stderr.Contains("--conntrack=bypass has no effect"); says != (choice == "bypass" && m.lacks(untracked)) {
					t.Errorf("the log says that --conntrack has no effect: %v", says)
				}
			})
		}
	}
}

// trackingTable reads the table of steering modes in docs/network-policy.md.
func trackingTable(t *testing.T) map[string]map[string]string {
	t.Helper()
	text := must.Read(t, "../../docs/network-policy.md")
	table := make(map[string]map[string]string)
	for _, m := range regexp.MustCompile(`(?m)^\| ([a-z/, ]+) \| (holds|fails) \| (holds|fails) \| (holds|fails) \|`).FindAllStringSubmatch(string(text), -1) {
		for name := range strings.SplitSeq(m[1], ", ") {
			table[strings.ReplaceAll(name, "/", "-")] = map[string]string{"bypass": m[2], "keep": m[3], "auto": m[4]}
		}
	}
	for _, m := range modes {
		if strings.HasPrefix(m.name, "tproxy-iptables") {
			table[m.name] = table["tproxy-iptables"]
		}
	}
	return table
}
