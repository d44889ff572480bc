package main

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// verdict returns what explain decides about a connection from elsewhere.
func verdict(t *testing.T, to string, args ...string) string {
	t.Helper()
	out, warnings, err := runCommand("", append([]string{"explain", "--hostname-override", "node-1", "--from", "198.51.100.7", "--to", to, "-o", "json"}, args...)...)
	if err != nil || warnings != "" && !strings.Contains(warnings, "the configuration file overrides") {
		t.Errorf("%s %q: %v %s", to, args, err, warnings)
		return ""
	}
	var answer struct{ Verdict string }
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		t.Errorf("%s %q: %v in %s", to, args, err, out)
	}
	return answer.Verdict
}

// writeFile returns the name of a file with a text.
func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	name = filepath.Join(t.TempDir(), name)
	must.OK(t, os.WriteFile(name, []byte(text), 0o600))
	return name
}

const proxyConfig = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

// TestExplainKnowsNodePortsAsRunDoes: kube-proxy's flags and configuration file
// say which addresses have node ports (A4.1, A4.4, A4.5).
func TestExplainKnowsNodePortsAsRunDoes(t *testing.T) {
	const primary, other, loopback, bound = "172.16.0.1:30080", "10.9.9.9:30080", "127.0.0.1:30080", "10.8.8.8:30080"
	nodeIP := []string{"--manifests", cluster, "--node-ip", "10.9.9.9"}
	nftables := writeFile(t, "nftables.yaml", proxyConfig+"mode: nftables\n")
	kubeadm := writeFile(t, "kubeadm.yaml", proxyConfig+"clientConnection: {kubeconfig: /f}\nnodePortAddresses: [10.9.9.0/24]\n")
	for _, test := range []struct{ args, accept, none string }{
		{"", primary + " " + other + " " + loopback, bound},
		{"--nodeport-addresses 10.9.9.0/24", other, primary + " " + loopback},
		{"--config " + kubeadm, other, primary + " " + loopback},
		{"--iptables-localhost-nodeports=false", primary + " " + other, loopback},
		{"--config " + writeFile(t, "loopback.yaml", proxyConfig+"iptables: {localhostNodePorts: false}\n"), primary + " " + other, loopback},
		{"--proxy-mode nftables", primary, other + " " + loopback},
		{"--config " + nftables, primary, other + " " + loopback},
		{"--config " + nftables + " --proxy-mode iptables", primary, other + " " + loopback}, // the file goes before the flag
		{"--proxy-mode nftables --nodeport-addresses all", primary + " " + other, bound},
		{"--metrics-bind-address 127.0.0.1:1 --workers 1 -v 2", primary, bound}, // no matter here
	} {
		for _, to := range strings.Fields(test.accept) {
			check.Equalf(t, verdict(t, to, append(strings.Fields(test.args), nodeIP...)...), "accept", "%q: %s", test.args, to)
		}
		for _, to := range strings.Fields(test.none) {
			if got := verdict(t, to, append(strings.Fields(test.args), nodeIP...)...); got == "accept" {
				t.Errorf("%q: %s: accept, want none", test.args, to)
			}
		}
	}
	check.Equalf(t, verdict(t, bound, "--manifests", cluster, "--bind-address", "10.8.8.8"), "accept", "a node port on --bind-address")
	if got := verdict(t, bound, "--manifests", cluster, "--config", writeFile(t, "bound.yaml", proxyConfig+"bindAddress: 10.8.8.8\n")); got != "accept" {
		t.Errorf("a node port on the file's bindAddress: %s", got)
	}
}

// TestExplainAsksTheAPIServerOnce: with --kubeconfig, or a configuration file
// that names one, the objects are the API server's.
func TestExplainAsksTheAPIServerOnce(t *testing.T) {
	objects := map[string][]runtime.Object{
		"/api/v1/services": {&corev1.Service{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"},
			Spec:       corev1.ServiceSpec{ClusterIP: "10.96.0.10", Type: corev1.ServiceTypeNodePort, Ports: []corev1.ServicePort{{Port: 80, NodePort: 30080}}},
		}},
		"/apis/discovery.k8s.io/v1/endpointslices": {&discoveryv1.EndpointSlice{
			TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
			ObjectMeta:  metav1.ObjectMeta{Namespace: "shop", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Port: ptr.To(int32(8080))}},
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"10.244.1.1"}}},
		}},
		"/api/v1/nodes": {&corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"}, ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}},
		"/apis/networking.k8s.io/v1/servicecidrs": {&networkingv1.ServiceCIDR{
			TypeMeta:   metav1.TypeMeta{APIVersion: "networking.k8s.io/v1", Kind: "ServiceCIDR"},
			ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}},
		}},
	}
	// It knows streaming lists alone: a watch that begins with all objects.
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		list := objects[r.URL.Path]
		if r.URL.Query().Get("sendInitialEvents") != "true" || len(list) == 0 {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		stream := json.NewEncoder(w)
		for _, o := range list {
			_ = stream.Encode(map[string]any{"type": "ADDED", "object": o})
		}
		end := metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "1", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}}
		end.SetGroupVersionKind(list[0].GetObjectKind().GroupVersionKind())
		_ = stream.Encode(map[string]any{"type": "BOOKMARK", "object": end})
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	defer server.Close()
	defer server.CloseClientConnections()
	kubeconfig := writeFile(t, "kubeconfig", `{apiVersion: v1, kind: Config, current-context: c,
clusters: [{name: c, cluster: {server: "`+server.URL+`"}}], contexts: [{name: c, context: {cluster: c, user: u}}], users: [{name: u}]}`)
	config := writeFile(t, "config.yaml", proxyConfig+"mode: nftables\nclientConnection: {kubeconfig: "+kubeconfig+"}\n")
	for _, args := range [][]string{{"--kubeconfig", kubeconfig}, {"--master", server.URL}, {"--config", config}} {
		check.Equalf(t, verdict(t, "10.96.0.10:80", args...), "accept", "%q", args)
	}
	if got := verdict(t, "127.0.0.1:30080", "--config", config); got == "accept" {
		t.Errorf("a node port on loopback in nftables mode: %s", got)
	}
	// --manifests goes before the API server of the file, not before one of flags.
	check.Equalf(t, verdict(t, "192.0.2.10:80", "--config", config, "--manifests", cluster), "drop", "--manifests beside --config")
	if _, _, err := runCommand("", explainArgs("-f", "-", "--kubeconfig", kubeconfig)...); err == nil || !strings.Contains(err.Error(), "exclude each other") {
		t.Errorf("--manifests beside --kubeconfig: %v", err)
	}
}
