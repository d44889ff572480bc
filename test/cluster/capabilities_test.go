//go:build cluster

package cluster

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// deployedContainer is the container of the DaemonSet in deploy/.
func deployedContainer(t *testing.T) *corev1.Container {
	t.Helper()
	text := must.Read(t, filepath.Join(deploy, "kustomize/base/daemonset.yaml"))
	set := &appsv1.DaemonSet{}
	must.OK(t, yaml.UnmarshalStrict(text, set))
	return &set.Spec.Template.Spec.Containers[0]
}

// testContainer runs the program as a container of the DaemonSet: on the image's
// file system, read-only, with /proc and /sys as a runtime mounts them, and with
// exactly these capabilities; then without each of them.
func testContainer(t *testing.T, w *world) {
	w = w.with(t, "n")
	deployed := deployedContainer(t)
	var granted []string
	for _, c := range deployed.SecurityContext.Capabilities.Add {
		granted = append(granted, string(c))
	}
	if s := deployed.SecurityContext; !*s.ReadOnlyRootFilesystem || *s.AllowPrivilegeEscalation || *s.Privileged || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) {
		t.Errorf("the container may do more: %+v", s)
	}
	w.grant(rights(deployedRole(t)))
	svc := w.tcpAndUDP("held", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalIPs = corev1.ServiceTypeNodePort, []string{netns.OwnIPs[0].String()}
	})
	defer w.admin.deleteServices(w.namespace)
	w.slice("held", w.pod2(), w.pod3())
	inside := at(svc.Spec.ClusterIP, 80)
	// Another program of the node has bound the UDP port of this Service.
	crowded := w.service("crowded", func(s *corev1.Service) {
		s.Spec.Ports = []corev1.ServicePort{{Name: "p-udp", Port: 54324, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP}}
	})
	w.slice("crowded", w.pod2(), w.pod3())
	other := must.Get(w.hosts.Node.ListenPacket("udp", ":54324"))(t)
	defer other.Close()
	for i := range len(granted) + 1 {
		capabilities, name := granted, "all"
		if i < len(granted) {
			capabilities = slices.Delete(slices.Clone(granted), i, i+1)
			name = "no " + granted[i]
		}
		t.Run(name, func(t *testing.T) {
			w := w.with(t, w.namespace)
			run := ""
			if name == "all" && slices.ContainsFunc(deployed.VolumeMounts, func(m corev1.VolumeMount) bool { return m.MountPath == "/run/sluice" && !m.ReadOnly }) {
				run = t.TempDir() // the other ones have a socket with an abstract name
			}
			program := "contained-" + strings.ReplaceAll(name, " ", "-") // no other test has a program of that name
			// Here a kubeconfig replaces a service account.
			cmd := w.startContained(container{
				name: program, granted: capabilities, run: run, files: map[string]string{"/etc/kubernetes/kubeconfig": w.kubeconfig("sluice")},
				args: []string{"run", "--kubeconfig", "/etc/kubernetes/kubeconfig", "--hostname-override", "node", "--detect-local-mode=NodeCIDR", "--bpf-root=/bpf",
					"--healthz-port=0", "--metrics-port=0", "--access-log", "off", "-v", "4"},
			})
			defer stop(cmd)
			says := func(text string) {
				t.Helper()
				w.until("it says "+text, func() error {
					if said := w.said(program); !strings.Contains(said, text) {
						return fmt.Errorf("it says\n%s", said)
					}
					return nil
				})
			}
			switch name {
			case "no NET_ADMIN":
				says("CAP_NET_ADMIN is missing") // and the program exits
				return
			case "no BPF":
				says("steering by tproxy/nftables; not sklookup/nftables (CAP_BPF is missing)")
			default:
				says("steering by sklookup/nftables")
				if said := w.said(program); strings.Contains(said, "ends with the process") {
					t.Errorf("its BPF program is not pinned:\n%s", said)
				}
			}
			if name == "all" {
				w.until("the admin socket is a file of the node", func() error {
					if files, err := filepath.Glob(filepath.Join(run, "admin*.sock")); run == "" || len(files) != 1 {
						return fmt.Errorf("%q has %v, %v; it says\n%s", run, files, err, w.said(program))
					}
					return nil
				})
			}
			w.everybody("tcp", inside, fmtPods(2, 3))
			w.everybody("tcp", at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort), fmtPods(2, 3))
			// Endpoints see the client's own address.
			w.expectAnswers("who is seen", "pod-1", func(patience time.Duration) string {
				_, seen := meet(patience, w.hosts.Pods[0], "tcp", inside)
				return w.owners[seen]
			})
			own, raw := fmtPods(2, 3), fmtPods(2, 3)
			switch name {
			case "no NET_BIND_SERVICE":
				own = "refused"
			case "no NET_RAW":
				raw = "silent"
			}
			w.expect(w.hosts.Outside, "tcp", at(netns.OwnIPs[0].String(), 80), own)
			w.expect(w.hosts.Node, "udp", inside, fmtPods(2, 3))
			w.expect(w.hosts.Outside, "udp", inside, fmtPods(2, 3))
			w.expect(w.hosts.Outside, "udp", at(crowded.Spec.ClusterIP, 54324), raw)
			if missing, ok := strings.CutPrefix(name, "no "); ok && missing != "PERFMON" { // of kernel flows alone: TestDeployedRights
				says("CAP_" + missing)
			}
		})
	}
}
