//go:build cluster

package cluster

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// TestClientPodNames: with --client-pod-names, a client that serves nothing has its pod's name, and loses
// it with its pod. Without the right to pods, the log says so, and the Service is served.
func TestClientPodNames(t *testing.T) {
	w := setUp(t)
	w.namespace = "default"
	svc := w.service("web", nil)
	address := at(svc.Spec.ClusterIP, 80)
	w.slice("web", w.pod1())
	pod := w.pod("asks", w.pod2())
	deployed := rights(deployedRole(t))
	w.grant(deployed)
	w.bind()
	w.startWith("sluice", false, "run", "--kubeconfig", w.kubeconfig("sluice"), "--hostname-override", "node", "--access-log", "off", "--client-pod-names")
	ask := func() error { return must.Err(w.hosts.Pods[1].Ask("tcp", address)) }
	w.until("the Service is served without the right to pods", ask)
	const refused = "the API server does not show us the pods of this node"
	w.until("the log names the right", func() error {
		if !strings.Contains(w.said("sluice"), refused) {
			return errNotYet
		}
		return nil
	})
	// records returns those of the pod's connections.
	records := func() (int, error) {
		out, err := w.hosts.Node.Command(t, os.Getenv("SLUICE_BIN"), "log", "client_pod=default/asks", "-o", "json").CombinedOutput()
		if err != nil {
			return 0, fmt.Errorf("%w: %s", err, out)
		}
		return strings.Count(string(out), `"client_pod":"default/asks"`), nil
	}
	if n, err := records(); n != 0 || err != nil {
		t.Errorf("%d records, %v, before the name is known", n, err)
	}
	w.grant(append(deployed, right{"", "pods", "list"}, right{"", "pods", "watch"}))
	named := func(want bool) {
		t.Helper()
		w.until(fmt.Sprint("records name the pod: ", want), func() error {
			if n, err := records(); err != nil || n > 0 != want {
				return fmt.Errorf("%d records, %w", n, err)
			}
			return nil
		})
	}
	named(true)
	w.deleteNow(pod)
	named(false)
	if n := strings.Count(w.said("sluice"), refused); n > 2 { // to list and to watch
		t.Errorf("the log says %d times what right is missing", n)
	}
}
