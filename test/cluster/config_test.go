//go:build cluster

package cluster

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// Our defaults are those that kube-proxy writes, except the periods of the modes
// that are not the default, which it leaves out.
func TestDefaultConfigIsKubeProxys(t *testing.T) {
	written := func(command ...string) map[string]any {
		t.Helper()
		path := filepath.Join(t.TempDir(), "config.yaml")
		must.Run(t, exec.Command(command[0], append(command[1:], "--write-config-to", path)...))
		text := must.Read(t, path)
		var config map[string]any
		must.OK(t, yaml.Unmarshal(text, &config))
		for mode, fields := range map[string][]string{"ipvs": {"syncPeriod"}, "nftables": {"syncPeriod", "minSyncPeriod"}} {
			for _, f := range fields {
				delete(config[mode].(map[string]any), f)
			}
		}
		return config
	}
	check.Textf(t, cmp.Diff(written(program(t, "kube-proxy")), written(os.Getenv("SLUICE_BIN"), "run")), "", "the default configuration (-kube-proxy +sluice)")
}

// testKubeProxysConfiguration runs the program in place of the image and the
// command of kube-proxy's DaemonSet: with the ConfigMap that kubeadm and kind
// write, where they mount it, with their arguments, and with the rights of
// kube-proxy's user.
func testKubeProxysConfiguration(t *testing.T, w *world) {
	w = w.with(t, "n")
	svc := w.tcpAndUDP("configured", func(*corev1.Service) {})
	defer w.admin.deleteServices(w.namespace)
	w.slice("configured", w.pod2(), w.pod3())
	for _, from := range []string{"kubeadm", "kind"} {
		t.Run(from, func(t *testing.T) {
			w := w.with(t, w.namespace)
			cmd := w.startContained(container{
				name: "sluice-" + from, granted: []string{everything}, args: []string{"run", "--config=/var/lib/kube-proxy/config.conf", "--hostname-override=node", "--access-log=off"},
				files: map[string]string{
					"/var/lib/kube-proxy/config.conf":     filepath.Join("../../cmd/sluice/internal/kubeproxyconfig/testdata", from+".yaml"),
					"/var/lib/kube-proxy/kubeconfig.conf": w.kubeconfig("system:kube-proxy"),
				},
			})
			defer stop(cmd)
			w.awaitProxy()
			w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(2, 3))
			w.everybody("udp", at(svc.Spec.ClusterIP, 80), fmtPods(2, 3))
			w.wantMetric("sluice_kubernetes_connected 1")
			w.wantNoAlarm("sluice-" + from)
		})
	}
}

// testNoOtherProxy starts the program as the only service proxy of a node, with the
// files and variables of its pod's service account and nothing else. The account's
// address of the API server is a cluster IP, so --master names the real one, and the
// server wants the account's token.
func testNoOtherProxy(t *testing.T, w *world) {
	w = w.with(t, "n")
	deployed := deployedContainer(t)
	var granted []string
	for _, c := range deployed.SecurityContext.Capabilities.Add {
		granted = append(granted, string(c))
	}
	w.grant(rights(deployedRole(t)))
	svc := w.service("first", nil)
	defer w.admin.deleteServices(w.namespace)
	w.slice("first", w.pod2(), w.pod3())
	w.write("token", "token-sluice")
	const account = "/var/run/secrets/kubernetes.io/serviceaccount/"
	cmd := w.startContained(container{
		name: "sluice-alone", granted: granted,
		files: map[string]string{account + "token": filepath.Join(w.dir, "token"), account + "ca.crt": filepath.Join(w.dir, "certs/apiserver.crt")},
		env:   []string{"KUBERNETES_SERVICE_HOST=10.96.0.1", "KUBERNETES_SERVICE_PORT=443"},
		args:  []string{"run", "--master=https://" + at(w.hosts.Node.IPv4.String(), 6443), "--hostname-override=node", "--detect-local-mode=NodeCIDR", "--access-log=off"},
	})
	defer stop(cmd)
	w.awaitProxy()
	w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(2, 3))
	w.wantMetric("sluice_kubernetes_connected 1")
	w.wantNoAlarm("sluice-alone")
}

// testConfigurationChanges changes the configuration file of a running program, as a
// change of the ConfigMap does on all nodes at once. Nothing ends; what can be applied
// is, the log names the rest, and a file that cannot be used changes nothing.
func testConfigurationChanges(t *testing.T, w *world) {
	w = w.with(t, "n")
	svc := w.tcpAndUDP("changed", func(*corev1.Service) {})
	defer w.admin.deleteServices(w.namespace)
	w.slice("changed", w.pod2(), w.pod3())
	address := at(svc.Spec.ClusterIP, 80)
	write := func(text string) {
		t.Helper()
		w.write("changing.conf", proxyConfig(w, "iptables")+text)
	}
	write("")
	const name = "sluice-changing"
	cmd := w.start(name, os.Getenv("SLUICE_BIN"), "run", "--config", filepath.Join(w.dir, "changing.conf"), "--hostname-override", "node", "--access-log", "off")
	defer stop(cmd)
	w.awaitProxy()
	w.expectSeen(w.hosts.Pods[0], address, "pod-1")
	steady := w.watch(address)

	write("iptables: {masqueradeAll: true}\n")
	w.expectSeen(w.hosts.Pods[0], address, "node")
	w.wantMetric("sluice_config_file_fields_pending 0")
	flags := func(line string) {
		t.Helper()
		w.until("/flagz says "+line, func() error {
			page, err := w.get("http://127.0.0.1:10249/flagz")
			if err == nil {
				err = wants(page, "\n"+line+"\n")
			}
			return err
		})
	}
	flags("masquerade-all=true")
	longer := strings.Replace(proxyConfig(w, "iptables"), "maxPerCore: 0", "maxPerCore: 0, udpTimeout: 7s", 1)
	w.write("changing.conf", longer+"iptables: {masqueradeAll: true, minSyncPeriod: 50ms}\n")
	flags("min-sync-period=50ms")
	flags("udp-timeout=30s") // it needs a restart
	write("iptables: {masqueradeAll: true}\nhealthzBindAddress: 0.0.0.0:10356\n")
	w.wantMetric("sluice_config_file_fields_pending 1")
	write("iptables: {masqueradeAll: maybe}\n")
	w.until("it says that the file cannot be used", func() error { return wants(w.said(name), "cannot be used; everything stays as it was") })
	w.expectSeen(w.hosts.Pods[0], address, "node")
	write("")
	w.expectSeen(w.hosts.Pods[0], address, "pod-1")
	w.wantMetric("sluice_config_file_fields_pending 0")
	check.OK(t, w.wantStatus("http://127.0.0.1:10256/healthz", "200"))
	steady.end()
	if len(steady.errors) > 0 {
		t.Error(steady.errors)
	}
	for _, text := range []string{"these fields are in force", "fields=[\"iptables.masqueradeAll\"]", "come into force with a restart", "fields=[\"healthzBindAddress\"]"} {
		check.OK(t, wants(w.said(name), text))
	}
}
