//go:build cluster

package cluster

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// catchUp bounds the time from when the API server is reachable again until all
// changes are in force: the current attempt to connect (5 s), the longest pause
// between two attempts (16 s), and a list; with a margin for a busy machine.
const catchUp = 30 * time.Second

// outage is a way to lose the API server.
type outage struct {
	name string
	// take makes it unreachable, and give makes it reachable again.
	take, give func()
	// changes is set if the Service web can get another endpoint during the
	// outage; otherwise it gets it afterwards.
	changes bool
	// missed is set if the outage ends only after the proxy has noticed it.
	missed bool
}

// TestOutage makes the API server unreachable in several ways. During the outage
// connections continue, and new ones are served as before; afterwards the proxy
// catches up by itself.
func TestOutage(t *testing.T) {
	w := setUp(t)
	w.namespace = "default"
	// By the node's address, so that the test can cut the proxy's path to the API
	// server and keep its own.
	server := fmt.Sprintf("https://%s:6443", w.hosts.Node.IPv4)
	w.write("far.conf", kubeconfig(server, "system:kube-proxy"))
	environment := must.Get(exec.LookPath("env"))(t)
	full := os.Getenv("SLUICE_TEST_FULL") == "1"
	args := []string{os.Getenv("SLUICE_BIN"), "run", "--kubeconfig", w.dir + "/far.conf", "--hostname-override", "node", "--access-log", "off"}
	if !full { // detect a dead connection within 2 s instead of 20
		args = append([]string{"HTTP2_READ_IDLE_TIMEOUT_SECONDS=1", "HTTP2_PING_TIMEOUT_SECONDS=1"}, args...)
	}
	w.start("sluice", environment, args...)
	w.awaitProxy()
	web, other := w.service("web", nil), w.service("other", nil)
	address := at(web.Spec.ClusterIP, 80)
	w.slice("web", w.pod1())
	w.slice("other", w.pod1())
	w.expect(w.hosts.Outside, "tcp", address, fmtPods(1))
	w.expect(w.hosts.Outside, "tcp", at(other.Spec.ClusterIP, 80), fmtPods(1))

	outages := []outage{
		{"killed and started again", func() { kill(w.api) }, func() { w.restartAPIServer(t) }, false, true},
		{"the network loses all packets", w.cut, w.mend, true, true},
		{"its history is lost meanwhile", w.cut, func() {
			w.compact()
			kill(w.api)
			w.restartAPIServer(t)
			w.mend()
		}, true, false},
	}
	if full { // after many outages the pauses between attempts are long
		outages = append(outages, outage{"its store is set up afresh", func() { kill(w.api); kill(w.store) }, func() {
			sub := w.t
			w.t = t
			w.startStore("etcd-2")
			w.t = sub
			w.restartAPIServer(t)
			for _, s := range []*corev1.Service{web, other} {
				w.service(s.Name, func(n *corev1.Service) { n.Spec.ClusterIP = s.Spec.ClusterIP })
			}
			w.slice("other", w.pod1())
			w.createNodes()
		}, false, true})
	}
	last := 1
	for i, o := range outages {
		t.Run(o.name, func(t *testing.T) {
			w.t, w.admin.t = t, t
			said := len(w.said("sluice"))
			steady, still := w.watch(address), w.watch(at(other.Spec.ClusterIP, 80))
			begin := time.Now()
			o.take()
			next := 3 - last
			if o.changes {
				w.slice("web", w.pods(next)...)
			}
			if o.missed {
				w.until("it notices", func() error { return wants(w.said("sluice")[said:], "the API server cannot be reached") })
				t.Logf("it was noticed after %s", time.Since(begin).Round(time.Millisecond))
				w.wantMetric("sluice_kubernetes_connected 0")
			}
			if full && strings.Contains(o.name, "network") {
				time.Sleep(time.Until(begin.Add(time.Minute)))
			}
			if err := w.wantStatus("http://127.0.0.1:10256/healthz", "200"); err != nil {
				t.Errorf("/healthz: %v", err) // A7.1: no change waits
			}
			check.Equalf(t, steady.names(), fmtPods(last), "while it is away new connections are served by")
			o.give()
			back := time.Now()
			if !o.changes {
				w.slice("web", w.pods(next)...)
			}
			_ = wait.Poll(catchUp, func() error {
				if steady.names() == fmtPods(last) {
					return errNotYet
				}
				return nil
			})
			t.Logf("what had changed was in force %s after it was back", time.Since(back).Round(time.Millisecond))
			steady.finish(fmt.Sprintf("pod-%d:8080 pod-%d:8080", last, next))
			still.finish(fmtPods(1))
			w.wantMetric("sluice_kubernetes_connected 1")
			if o.missed {
				w.until("it says so", func() error { return wants(w.said("sluice")[said:], "the API server is reached again") })
			}
			checkSaidOnce(t, w.said("sluice")[said:])
			if i >= 2 {
				w.until("it says that it listed anew", func() error { return wants(w.said("sluice")[said:], "were listed anew") })
				body, _ := w.get("http://127.0.0.1:10249/metrics")
				if strings.Contains(body, "\nsluice_kubernetes_relists_total 0\n") || !strings.Contains(body, "\nsluice_kubernetes_relists_total ") {
					t.Error("sluice_kubernetes_relists_total counts nothing")
				}
			}
			last = next
		})
	}
	w.t, w.admin.t = t, t
	for _, page := range []struct{ url, want string }{
		{"http://127.0.0.1:10249/proxyMode", "200 iptables"},
		{"http://127.0.0.1:10249/healthz", "200 ok"},
		{"http://127.0.0.1:10256/healthz", "200 {\"lastUpdated\""},
	} {
		if body, err := w.get(page.url); err != nil || !strings.HasPrefix(body, page.want) {
			t.Errorf("%s: %v %.100s", page.url, err, body)
		}
	}
}

// checkSaidOnce expects each loss of the API server to be said once. There may be several:
// the server, or the program, may be slow to answer a ping.
func checkSaidOnce(t *testing.T, log string) {
	t.Helper()
	lost := false
	for line := range strings.Lines(log) {
		switch {
		case strings.Contains(line, "the API server is reached again"):
			lost = false
		case strings.Contains(line, "the API server cannot be reached") && lost:
			t.Errorf("it is said again that the API server cannot be reached: %s", line)
		case strings.Contains(line, "the API server cannot be reached"):
			lost = true
		}
	}
}

func wants(text, part string) error {
	if !strings.Contains(text, part) {
		return fmt.Errorf("%q is not said", part)
	}
	return nil
}

// wantMetric waits for a line of /metrics.
func (w *world) wantMetric(line string) {
	w.t.Helper()
	w.until(line, func() error {
		body, err := w.get("http://127.0.0.1:10249/metrics")
		if err == nil {
			err = wants(body, "\n"+line+"\n")
		}
		return err
	})
}

// pods returns the endpoint of that number.
func (w *world) pods(n int) []endpoint { return []endpoint{w.all()[n-1]} }

func (w *world) restartAPIServer(t *testing.T) {
	w.t.Helper()
	sub := w.t
	w.t = t // the process outlives the subtest
	w.startAPIServer()
	w.t = sub
	w.awaitAPIServer()
}

// cut drops all packets between the node's own address and the API server; mend
// ends that.
func (w *world) cut() {
	w.t.Helper()
	ip := w.hosts.Node.IPv4
	w.nft(fmt.Sprintf(`table ip cut { chain c { type filter hook prerouting priority -400;
ip saddr %s tcp sport 6443 drop
ip daddr %s tcp dport 6443 drop
}; }`, ip, ip))
}

func (w *world) mend() { w.t.Helper(); w.nft("delete table ip cut") }

func (w *world) nft(script string) { w.t.Helper(); w.nftOn(w.hosts.Node, script) }

func (w *world) nftOn(h *netns.Host, script string) {
	w.t.Helper()
	cmd := h.Command(w.t, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	must.Run(w.t, cmd)
}

// compact makes etcd forget all revisions but the last.
func (w *world) compact() {
	w.t.Helper()
	body, err := w.post(etcd+"/v3/kv/range", `{"key":"AA==","range_end":"AA==","count_only":true}`)
	must.OK(w.t, err)
	_, after, _ := strings.Cut(body, `"revision":"`)
	revision, _, _ := strings.Cut(after, `"`)
	if body, err = w.post(etcd+"/v3/kv/compaction", `{"revision":"`+revision+`","physical":true}`); err != nil || !strings.HasPrefix(body, "200") {
		w.t.Fatalf("compaction: %v %s", err, body)
	}
}

// post sends JSON to an HTTP server on the node.
func (w *world) post(url, body string) (string, error) {
	request, err := http.NewRequest(http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		return "", err
	}
	return w.do(request)
}
