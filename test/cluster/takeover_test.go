//go:build cluster

package cluster

import (
	"fmt"
	"slices"
	"testing"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestTakeOverOfContainers replaces the DaemonSet's container by another one with its exact
// rights, in a PID namespace of its own, while clients connect, talk and ask, forwarded and
// relayed: none of them fails. The old container gets SIGTERM as soon as the new one is ready,
// as in a rolling update.
func TestTakeOverOfContainers(t *testing.T) {
	w := setUp(t)
	w.admin.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "n"}})
	w.namespace = "n"
	w.bind()
	w.grant(rights(deployedRole(t)))
	var granted []string
	deployed := deployedContainer(t)
	if !slices.Contains(deployed.Args, "--take-over") {
		t.Error("the DaemonSet does not take over")
	}
	for _, c := range deployed.SecurityContext.Capabilities.Add {
		granted = append(granted, string(c))
	}
	pins := t.TempDir()
	must.OK(t, unix.Mount("bpf", pins, "bpf", 0, "mode=700"))
	t.Cleanup(func() { _ = unix.Unmount(pins, unix.MNT_DETACH) })
	pod := func(name string) *netns.Cmd {
		return w.startContained(container{
			name: name, granted: granted, files: map[string]string{"/etc/kubernetes/kubeconfig": w.kubeconfig("sluice")}, pins: pins, apart: true,
			args: []string{"run", "--take-over", "--kubeconfig", "/etc/kubernetes/kubeconfig", "--hostname-override", "node", "--detect-local-mode=NodeCIDR",
				"--bpf-root=/bpf", "--access-log", "off"},
		})
	}
	before, name := pod("pod-0"), "pod-0"
	w.awaitProxy()
	svc := w.tcpAndUDP("kept", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	w.slice("kept", w.pod2())
	nodePort := at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort)
	address := at(svc.Spec.ClusterIP, 80)
	w.everybody("tcp", address, fmtPods(2))
	w.everybody("udp", address, fmtPods(2))
	w.expect(w.hosts.Outside, "tcp", nodePort, fmtPods(2))
	inside, outside := w.watch(address), w.watch(nodePort)
	inside.run(func() error { return w.wantStatus("http://127.0.0.1:10256/livez", "200") })
	inside.run(func() error { return w.wantStatus("http://127.0.0.1:10256/healthz", "200") })
	inside.run(func() error { return w.wantStatus("http://127.0.0.1:10249/metrics", "200") })
	for _, from := range []*netns.Host{w.hosts.Outside, w.hosts.Node} {
		inside.run(func() error {
			dropped := netns.Dropped(t)
			name, err := askWithin(answer, from, "udp", address)
			if now := netns.Dropped(t); err != nil && now > dropped {
				t.Logf("%v, and the kernel dropped %d packets that waited for a CPU", err, now-dropped)
				return nil
			}
			if err == nil && name != fmtPods(2) {
				err = fmt.Errorf("%s answers %s over UDP", name, from.Name())
			}
			return err
		})
	}
	var left []*netns.Cmd
	for i := range 3 {
		next := fmt.Sprintf("pod-%d", i+1)
		cmd := pod(next)
		w.until(next+" has taken over", func() error { return wants(w.said(next), "took over from the running sluice") })
		w.until(next+" is ready", func() error { return wants(w.said(next), " ready ") })
		w.terminate(before)
		left = append(left, before)
		w.until(name+" has seen that", func() error { return wants(w.said(name), "another sluice has taken over") })
		before, name = cmd, next
		w.awaitProxy()
	}
	inside.finish(fmtPods(2))
	outside.finish(fmtPods(2))
	inside.close()
	outside.close()
	for _, cmd := range left { // what they had has ended
		check.OKf(t, cmd.Wait(), "a container that gave way")
	}
	w.everybody("tcp", address, fmtPods(2))
	w.terminate(before)
	check.OK(t, before.Wait())
}
