//go:build cluster

package cluster

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
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

// TestLatency measures how long after the change of a slice the first connection
// reaches the new endpoint, with Sluice and with kube-proxy, whose minSyncPeriod is 100 ms here
// and 1 s by default. It prints, and fails on nothing but wrong answers.
func TestLatency(t *testing.T) {
	services, rounds := 200, 11
	if os.Getenv("SLUICE_TEST_FULL") == "1" {
		services = 5000
	}
	w := setUp(t)
	w.namespace = "default"
	for i := range services {
		name := fmt.Sprintf("s%d", i)
		w.service(name, nil)
		w.slice(name, w.all()...)
	}
	svc := w.service("web", nil)
	address := at(svc.Spec.ClusterIP, 80)
	w.slice("web", w.pod1())
	for _, p := range proxies {
		t.Run(p.name, func(t *testing.T) {
			w.t, w.admin.t = t, t
			begin := time.Now()
			cmd := p.start(w)
			w.expect(w.hosts.Outside, "tcp", address, fmtPods(1))
			t.Logf("%s: %d services in force %s after the start; resident memory %s", p.name, services, time.Since(begin).Round(time.Millisecond), residentMemory(cmd))
			var took []time.Duration
			for i := range rounds {
				to, want := w.pod3(), fmtPods(3)
				if i%2 == 1 {
					to, want = w.pod1(), fmtPods(1)
				}
				begin := time.Now()
				w.slice("web", to)
				for outcome(w.hosts.Outside, "tcp", address, 1) != want {
					if time.Since(begin) > patience {
						t.Fatalf("not served by %s within %s", want, patience)
					}
				}
				took = append(took, time.Since(begin))
			}
			slices.Sort(took)
			t.Logf("%s: from the change of a slice to a connection: median %s, least %s, most %s", p.name,
				took[len(took)/2].Round(100*time.Microsecond), took[0].Round(100*time.Microsecond), took[len(took)-1].Round(100*time.Microsecond))
			w.slice("web", w.pod1())
			_ = cmd.Process.Signal(os.Interrupt)
			_ = cmd.Wait()
		})
	}
}

func residentMemory(cmd *netns.Cmd) string {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", cmd.Process.Pid))
	if err != nil {
		return "unknown"
	}
	for line := range strings.Lines(string(status)) {
		if text, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			return strings.TrimSpace(text)
		}
	}
	return "unknown"
}
