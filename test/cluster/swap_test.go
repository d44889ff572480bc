//go:build cluster

package cluster

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/test/netns"
)

// TestSwap swaps the real kube-proxy for the program on a node that serves, and back,
// in the order of docs/swap.md: for a moment both run. No new connection breaks on the
// way there, and one at most on the way back. Open ones break both times: the client has
// one open at a time, and may have it when Sluice starts.
func TestSwap(t *testing.T) {
	w := setUp(t)
	w.admin.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	w.namespace = "n"
	for _, mode := range []string{"nftables", "iptables"} {
		t.Run(mode, func(t *testing.T) { testSwap(t, w.with(t, "n"), mode) })
	}
}

func testSwap(t *testing.T, w *world, mode string) {
	svc := w.tcpAndUDP("swapped-"+mode, func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	defer w.admin.deleteServices(w.namespace)
	w.slice(svc.Name, w.pod2())
	address := at(svc.Spec.ClusterIP, 80)
	w.write("swap.conf", proxyConfig(w, mode))
	config := []string{"--config", filepath.Join(w.dir, "swap.conf"), "--hostname-override", "node"}
	startKubeProxy := func() *netns.Cmd {
		return w.start("kube-proxy-"+mode, program(t, "kube-proxy"), config...)
	}
	kubeProxy := startKubeProxy()
	defer func() { stop(kubeProxy) }()
	w.awaitProxy()
	w.everybody("tcp", address, fmtPods(2))

	there := w.newConnections(address)
	name := "sluice-" + mode
	sluice := w.start(name, os.Getenv("SLUICE_BIN"), append([]string{"run", "--access-log", "off"}, config...)...)
	w.until("it is ready beside kube-proxy", func() error { return wants(w.said(name), " ready ") })
	stop(kubeProxy)
	w.until("it has kube-proxy's ports", func() error { return w.wantStatus("http://127.0.0.1:10256/healthz", "200") })
	out, err := w.hosts.Node.Command(t, os.Getenv("SLUICE_BIN"), "cleanup", "--kube-proxy").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "removed") {
		t.Errorf("cleanup --kube-proxy: %v\n%s", err, out)
	}
	w.wantMetric("sluice_kubernetes_connected 1")
	w.everybody("tcp", address, fmtPods(2))
	w.everybody("udp", address, fmtPods(2))
	there.end()
	if len(there.errors) == 1 && errors.Is(there.errors[0], syscall.ECONNRESET) {
		t.Logf("open when Sluice started: %v", there.errors[0])
		there.errors = nil
	}
	there.finish("pod-2:8080")

	back := w.newConnections(address)
	kubeProxy = startKubeProxy()
	w.until("kube-proxy has written its rules", func() error { return w.hasRules(t, mode) })
	stop(sluice)
	// What Sluice leaves for the next process would decide for five minutes.
	if out, err := w.hosts.Node.Command(t, os.Getenv("SLUICE_BIN"), "cleanup").CombinedOutput(); err != nil {
		t.Errorf("cleanup: %v\n%s", err, out)
	}
	w.awaitProxy()
	w.everybody("tcp", address, fmtPods(2))
	w.everybody("udp", address, fmtPods(2))
	w.slice(svc.Name, w.pod3()) // it is kube-proxy that follows
	w.expect(w.hosts.Outside, "tcp", address, fmtPods(3))
	back.end()
	broken := 0
	for _, err := range back.errors {
		t.Logf("on the way back: %v", err)
		broken++
	}
	if broken > 1 || back.attempts < 10 {
		t.Errorf("%d of %d new connections broke", broken, back.attempts)
	}
	if out, err := w.hosts.Node.Command(t, program(t, "kube-proxy"), "--cleanup").CombinedOutput(); err != nil {
		t.Logf("kube-proxy --cleanup: %v\n%s", err, out)
	}
}

// newConnections is watch without connections that stay open. Its client goes on after
// an error.
func (w *world) newConnections(address string) *steady {
	s := &steady{w: w, address: address, stop: make(chan struct{})}
	s.run(func() error {
		if err := s.connect(); err != nil {
			s.note(err)
		}
		return nil
	})
	w.t.Cleanup(s.end)
	return s
}

// hasRules tells whether kube-proxy's rules name a Service's cluster IP.
func (w *world) hasRules(t *testing.T, mode string) error {
	command := []string{"nft", "list", "table", "ip", "kube-proxy"}
	if mode == "iptables" {
		command = []string{"iptables-save", "-t", "nat"}
	}
	out, err := w.hosts.Node.Command(t, command[0], command[1:]...).CombinedOutput()
	if err == nil {
		err = wants(string(out), "swapped-"+mode)
	}
	return err
}
