//go:build cluster

package cluster

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/netpolicy"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestNetworkPolicies plays rules of network policies against the real kube-proxy and
// against each data path, and compares the results with the table in
// docs/network-policy.md. Without SLUICE_TEST_FULL, the data paths are left to the test of
// this name in test/e2e.
func TestNetworkPolicies(t *testing.T) {
	w := setUp(t)
	w.admin.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "policies"}})
	w.namespace = "policies"
	var addresses []string
	for i := range netpolicy.Services() {
		svc := w.service(fmt.Sprintf("s%d", i), nil)
		w.slice(svc.Name, w.pod1())
		addresses = append(addresses, at(svc.Spec.ClusterIP, 80))
	}
	defer w.admin.deleteServices(w.namespace)
	for _, p := range []struct {
		path, program string
		mode          string // of kube-proxy
		flags         []string
	}{
		{"kube-proxy", "kube-proxy", "nftables", nil},
		{"kube-proxy", "kube-proxy", "iptables", nil},
		{"relay, bypass", "sluice", "", []string{"--datapath", "relay", "--conntrack", "bypass"}},
		{"relay, keep", "sluice", "", []string{"--datapath", "relay", "--conntrack", "keep"}},
		{"kernel flows", "sluice", "", nil},
	} {
		if p.program == "sluice" && os.Getenv("SLUICE_TEST_FULL") == "" {
			continue
		}
		t.Run(strings.ReplaceAll(p.path, ", ", "-")+p.mode, func(t *testing.T) {
			w := w.with(t, w.namespace)
			w.write("policies.conf", proxyConfig(w, p.mode))
			flags := append([]string{"--config", filepath.Join(w.dir, "policies.conf"), "--hostname-override", "node"}, p.flags...)
			var cmd *netns.Cmd
			if p.program == "sluice" {
				cmd = w.start(p.path, os.Getenv("SLUICE_BIN"), append([]string{"run", "--access-log", "off"}, flags...)...)
			} else {
				cmd = w.start(p.path+p.mode, program(t, p.program), flags...)
				defer func() {
					if out, err := w.hosts.Node.Command(t, program(t, p.program), "--cleanup").CombinedOutput(); err != nil {
						t.Logf("kube-proxy --cleanup: %v\n%s", err, out)
					}
				}()
			}
			defer func() { stop(cmd) }()
			w.awaitProxy()
			for _, a := range addresses {
				w.expect(w.hosts.Pods[1], "tcp", a, fmtPods(1))
			}
			netpolicy.Play(t, w.hosts.Node, p.path, func(service int, expected bool) bool {
				patience := 1200 * time.Millisecond
				if expected {
					patience = wait.Patience
				}
				server, _ := meet(patience, w.hosts.Pods[1], "tcp", addresses[service])
				return strings.HasPrefix(server, "pod-1")
			})
		})
	}
}
