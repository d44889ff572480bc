//go:build cluster

package cluster

import (
	"strings"
	"testing"
	"time"
)

// TestOutage kills the API server and starts it again: what is in force stays,
// and what changed meanwhile is in force soon afterwards.
func TestOutage(t *testing.T) {
	w := setUp(t)
	w.namespace = "default"
	startSluice(w)
	svc := w.service("web", nil)
	address := at(svc.Spec.ClusterIP, 80)
	w.slice("web", w.pod1())
	w.expect(w.hosts.Outside, "tcp", address, fmtPods(1))

	w.killAPIServer()
	w.until("it notices", func() error {
		if !strings.Contains(w.said("sluice"), "the API server cannot be reached") {
			return errNotYet
		}
		return nil
	})
	w.expect(w.hosts.Outside, "tcp", address, fmtPods(1))
	if err := w.wantStatus("http://127.0.0.1:10256/healthz", "200"); err != nil {
		t.Errorf("/healthz: %v", err) // KEP-3836: the last state stays
	}

	w.startAPIServer()
	w.awaitAPIServer()
	w.slice("web", w.pod2())
	begin := time.Now()
	w.expect(w.hosts.Outside, "tcp", address, fmtPods(2))
	t.Logf("a change made once the API server was back was in force %s later", time.Since(begin).Round(time.Millisecond))
	w.until("it says so", func() error {
		if !strings.Contains(w.said("sluice"), "the API server is reached again") {
			return errNotYet
		}
		return nil
	})
	for _, page := range []struct{ url, want string }{
		{"http://127.0.0.1:10249/proxyMode", "200 iptables"},
		{"http://127.0.0.1:10249/healthz", "200 ok"},
		{"http://127.0.0.1:10256/healthz", "200 {\"lastUpdated\""},
		{"http://127.0.0.1:10249/configz", "200 {\"kubeproxy.config.k8s.io\""},
	} {
		if body, err := w.get(page.url); err != nil || !strings.HasPrefix(body, page.want) {
			t.Errorf("%s: %v %.100s", page.url, err, body)
		}
	}
}
