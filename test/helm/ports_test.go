package helm

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/dynamic/fake"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/helm/chart"
)

// apiServer is an API server with one ConfigMap.
type apiServer struct{ client dynamic.Interface }

var _ engine.ClientProvider = apiServer{}

func newAPIServer(name, key, text string) apiServer {
	scheme := runtime.NewScheme()
	_ = corev1.AddToScheme(scheme)
	return apiServer{fake.NewSimpleDynamicClient(scheme, &corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"}, ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: name}, Data: map[string]string{key: text},
	})}
}

// GetClientFor implements engine.ClientProvider.
func (a apiServer) GetClientFor(_, kind string) (dynamic.NamespaceableResourceInterface, bool, error) {
	if kind != "ConfigMap" {
		return nil, false, fmt.Errorf("%s is looked up", kind)
	}
	return a.client.Resource(schema.GroupVersionResource{Version: "v1", Resource: "configmaps"}), true, nil
}

// daemonSet returns the DaemonSet among rendered objects.
func daemonSet(t *testing.T, objects []string) *appsv1.DaemonSet {
	t.Helper()
	for _, text := range objects {
		set := &appsv1.DaemonSet{}
		if strings.Contains(text, "kind: DaemonSet\n") {
			if err := yaml.UnmarshalStrict([]byte(text), set); err != nil {
				t.Fatal(err)
			}
			return set
		}
	}
	t.Fatal("there is no DaemonSet")
	return nil
}

// ports says where a DaemonSet's kubelet asks, and which port Prometheus does.
func ports(t *testing.T, objects []string) string {
	t.Helper()
	c := daemonSet(t, objects).Spec.Template.Spec.Containers[0]
	text := fmt.Sprintf("%s:%s", c.LivenessProbe.HTTPGet.Host, c.LivenessProbe.HTTPGet.Port.String())
	if c.ReadinessProbe.HTTPGet.Port != c.LivenessProbe.HTTPGet.Port || c.ReadinessProbe.HTTPGet.Host != c.LivenessProbe.HTTPGet.Host {
		text += " and another one"
	}
	if len(c.Ports) > 0 {
		t.Errorf("the pods declare ports, which keep the next pod off the node: %v", c.Ports)
	}
	for _, object := range objects {
		policy := &networkingv1.NetworkPolicy{}
		if strings.Contains(object, "kind: NetworkPolicy\n") {
			if err := yaml.UnmarshalStrict([]byte(object), policy); err != nil {
				t.Fatal(err)
			}
			text += " metrics " + policy.Spec.Ingress[0].Ports[0].Port.String()
		}
	}
	return text
}

// policy are values for an object that names the port of the metrics.
var policy = map[string]any{"networkPolicy": map[string]any{"enabled": true, "from": []any{map[string]any{"namespaceSelector": map[string]any{}}}}}

// With kube-proxy's ConfigMap the program serves where its configuration says,
// whatever the flags are. So the probes and the ports of the chart follow it, or the
// render fails.
func TestPortsFollowTheConfigMap(t *testing.T) {
	const kind = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"
	for _, test := range []struct {
		config, values string
		want           string // or a part of the error
	}{
		{`healthzBindAddress: ""`, ``, ":10256 metrics 10249"},
		{`healthzBindAddress: 0.0.0.0:10356`, ``, ":10356 metrics 10249"},
		{`healthzBindAddress: 192.0.2.7`, ``, "192.0.2.7:10256 metrics 10249"},
		{`healthzBindAddress: 127.0.0.1:99`, ``, "127.0.0.1:99 metrics 10249"},
		{`metricsBindAddress: "[::]:10349"`, ``, ":10256 metrics 10349"},
		{`bindAddress: "::"`, ``, ":10256 metrics 10249"},
		{`healthzBindAddress: 0.0.0.0:10356`, `healthzPort: 10356`, ":10356 metrics 10249"},
		{`healthzBindAddress: 0.0.0.0:10356`, `healthzPort: 10256`, "nothing would serve it, as healthzBindAddress of ConfigMap kube-proxy says port 10356"},
		{`metricsBindAddress: ""`, `metricsBindAddress: "0.0.0.0:10249"`, "nothing would serve it, as metricsBindAddress of ConfigMap kube-proxy says 127.0.0.1"},
		{`a: [`, ``, "config.conf"},
		{``, `kubeProxyConfigKey: config`, "has no key config"},
		{``, `kubeProxyConfigMap: other`, "cannot be read here"},
	} {
		values := map[string]any{"kubeProxyConfigMap": "kube-proxy", "monitoring": policy}
		if err := yaml.Unmarshal([]byte(test.values), &values); err != nil {
			t.Fatal(err)
		}
		objects, err := chart.Render(filepath.Join(deploy, "helm/sluice"), chart.Release{
			Name: ourName, Namespace: "kube-system", Values: values, Objects: newAPIServer("kube-proxy", "config.conf", kind+test.config+"\n"),
		})
		if err != nil {
			if !strings.Contains(err.Error(), test.want) {
				t.Errorf("%s, %s: %v, want %q", test.config, test.values, err, test.want)
			}
			continue
		}
		set := daemonSet(t, objects)
		if got := ports(t, objects); got != test.want {
			t.Errorf("%s, %s: %q, want %q", test.config, test.values, got, test.want)
		}
		for _, arg := range set.Spec.Template.Spec.Containers[0].Args {
			if strings.HasPrefix(arg, "--healthz") || strings.HasPrefix(arg, "--metrics") {
				t.Errorf("%s, %s: the program gets %s, which its configuration overrides", test.config, test.values, arg)
			}
		}
	}
}

// Without the ConfigMap the flags and the probes name the same ports.
func TestPortsFollowTheValues(t *testing.T) {
	for _, test := range []struct {
		healthz any
		metrics string
		args    string
		want    string
	}{
		{nil, "", "", ":10256 metrics 10249"},
		{10266, "127.0.0.1:10269", "--healthz-bind-address=0.0.0.0:10266 --metrics-bind-address=127.0.0.1:10269", ":10266 metrics 10269"},
		{nil, "0.0.0.0", "--metrics-bind-address=0.0.0.0", ":10256 metrics 10249"},
		{nil, ":10349", "--metrics-bind-address=:10349", ":10256 metrics 10349"},
		{nil, "::", "--metrics-bind-address=::", ":10256 metrics 10249"},
		{nil, "[::]:1", "--metrics-bind-address=[::]:1", ":10256 metrics 1"},
	} {
		objects, err := render(ourName, map[string]any{"healthzPort": test.healthz, "metricsBindAddress": test.metrics, "monitoring": policy})
		if err != nil {
			t.Fatal(err)
		}
		set := daemonSet(t, objects)
		var args []string
		for _, arg := range set.Spec.Template.Spec.Containers[0].Args {
			if strings.Contains(arg, "-bind-address") {
				args = append(args, arg)
			}
		}
		if got := ports(t, objects); got != test.want || strings.Join(args, " ") != test.args {
			t.Errorf("%v, %s: %q and %v, want %q and %s", test.healthz, test.metrics, got, args, test.want, test.args)
		}
	}
}
