package manifests

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
)

// TestSlicesThatBelongNowhere: a slice whose Service, or whose port of that name, does
// not exist is the likeliest slip, and is named with its file and line.
func TestSlicesThatBelongNowhere(t *testing.T) {
	dir := t.TempDir()
	service := "apiVersion: v1\nkind: Service\nmetadata: {name: web}\nspec: {clusterIP: 10.96.0.1, ports: [{name: http, port: 80}, {name: dns, port: 53, protocol: UDP}]}\n"
	slice := func(name, service, port string) string {
		return fmt.Sprintf("apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: %s\n  labels:\n    kubernetes.io/service-name: %s\naddressType: IPv4\nports:\n- %s\nendpoints: [{addresses: [10.1.0.1]}]\n", name, service, port)
	}
	write(t, filepath.Join(dir, "a.yaml"), service+"---\n"+slice("a-1", "web", "name: htpp\n  port: 8080")+"---\n"+slice("a-2", "webb", "name: http\n  port: 8080"))
	write(t, filepath.Join(dir, "b.yaml"), slice("b-1", "web", "port: 8080")+"---\n"+slice("b-2", "web", "name: dns\n  port: 53"))
	write(t, filepath.Join(dir, "e.yaml"), strings.Replace(eps("other", "10.1.0.9"), "other", "nobody", 1))
	write(t, filepath.Join(dir, "fine.yaml"), slice("fine", "web", "name: http\n  port: 8080")+"---\n"+
		slice("later", "later", "name: x\n  port: 1")+"---\n"+slice("none", "none", "name: x\n  port: 1")+
		"---\napiVersion: v1\nkind: Service\nmetadata: {name: none}\nspec: {clusterIP: None}\n")
	write(t, filepath.Join(dir, "g.yaml"), strings.Replace(slice("g-1", "web", "name: http"), "ports:\n- name: http\n", "", 1)+"---\n"+slice("g-2", "web", "name: http")+"---\n"+
		strings.NewReplacer("IPv4", "IPv6", "10.1.0.1", "fd00::1").Replace(slice("g-3", "web", "name: http\n  port: 8080"))+"---\n"+
		strings.Replace(eps("web", "10.1.0.9"), "  ports:\n  - port: 8080\n", "", 1))
	write(t, filepath.Join(dir, "h.yaml"), svc("one", "10.96.0.9")+"---\n"+strings.Replace(eps("one", "10.1.0.9"), "  ports:", "  notReadyAddresses: [{ip: \"fd00::9\"}]\n  ports:", 1))
	b := start(t, dir)
	for _, line := range []string{
		`g.yaml:1: EndpointSlice default/g-1: ports: is missing, so these endpoints are not used; the Service default/web has \"http\" (TCP), \"dns\" (UDP)`,
		`g.yaml:18: EndpointSlice default/g-2: ports[0].port: is missing: this port is not used`,
		`g.yaml:21: EndpointSlice default/g-3: the Service default/web has no cluster IP of addressType IPv6, so these endpoints are not used`,
		`g.yaml:33: Endpoints default/web: subsets[0].ports: is missing`,
		`: Endpoints default/one: subsets[0]: the Service default/one has no cluster IP of addressType IPv6, so the subset's addresses of this family are not used`,
		`a.yaml:14: EndpointSlice default/a-1: ports[0]: the Service default/web has no port \"htpp\" (TCP), only \"http\" (TCP), \"dns\" (UDP): this port is not used`,
		`a.yaml:23: EndpointSlice default/a-2: the Service default/webb does not exist, so these endpoints are not used; did you mean \"web\"?`,
		`b.yaml:9: EndpointSlice default/b-1: ports[0]: the Service default/web has no port without a name (TCP)`,
		`b.yaml:20: EndpointSlice default/b-2: ports[0]: the Service default/web has no port \"dns\" (TCP)`,
		`e.yaml:1: Endpoints default/nobody: the Service default/nobody does not exist`,
		`fine.yaml:18: EndpointSlice default/later: the Service default/later does not exist, so these endpoints`,
	} {
		b.logs(line)
	}
	for _, fine := range []string{"default/fine", "default/none"} {
		if n := b.count(fine + ":"); n > 0 {
			t.Errorf("%d lines about %s", n, fine)
		}
	}

	// Later a file may come before the one that it belongs to.
	begin := time.Now()
	write(t, filepath.Join(dir, "c.yaml"), slice("c-1", "cart", "port: 1"))
	b.settled()
	write(t, filepath.Join(dir, "d.yaml"), svc("cart", "10.96.0.7"))
	b.settled()
	write(t, filepath.Join(dir, "f.yaml"), slice("f-1", "fish", "port: 1"))
	b.logs("f.yaml:6: EndpointSlice default/f-1: the Service default/fish does not exist")
	if took := time.Since(begin); took < strayGrace {
		t.Errorf("logged after %s, before %s", took, strayGrace)
	}
	if n := b.count("c.yaml"); n > 0 && time.Since(begin) < 2*strayGrace {
		t.Errorf("%d lines about a slice whose Service came at once", n)
	}
	write(t, filepath.Join(dir, "f.yaml"), "# said once more\n"+slice("f-1", "fish", "port: 1"))
	b.settled()
	check.Equalf(t, b.count("f-1"), 1, "lines about one stray")
	remove(t, filepath.Join(dir, "d.yaml"))
	b.logs("c.yaml:6: EndpointSlice default/c-1: the Service default/cart does not exist")
	check.Equalf(t, b.w.Where("Service default/web")+" "+b.w.Where("EndpointSlice default/a-2")+b.w.Where("Service default/none-such"), "a.yaml:1 a.yaml:18", "Where")
}

// TestAnnotationsThatAreNotKnown are errors that name what is meant.
func TestAnnotationsThatAreNotKnown(t *testing.T) {
	text := func(annotation string) []byte {
		return []byte("apiVersion: v1\nkind: Service\nmetadata:\n  name: web\n  annotations:\n    " + annotation + "\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n")
	}
	check := func(name, value string) error {
		if value == "wrong" {
			return fmt.Errorf("%s is wrong", name)
		}
		return nil
	}
	for annotation, want := range map[string]string{
		"sluice.dev/balancr: random":  "a.yaml:6: Service default/web: metadata.annotations[sluice.dev/balancr]: is not known; did you mean sluice.dev/balancer?",
		"sluice.dev/nothing-of-it: a": "a.yaml:6: Service default/web: metadata.annotations[sluice.dev/nothing-of-it]: is not known: there are sluice.dev/",
		"sluice.dev/balancer: wrong":  "a.yaml:6: Service default/web: metadata.annotations[sluice.dev/balancer]: balancer is wrong",
		"sluice.dev/balancer: random": "",
		"example.com/balancr: random": "",
	} {
		_, findings := decode("a.yaml", text(annotation), Options{Annotation: check})
		switch {
		case want == "" && len(findings) == 0:
		case len(findings) != 1 || findings[0].warning || want == "" || !strings.HasPrefix(findings[0].String(), want):
			t.Errorf("%s: %v, want %q", annotation, findings, want)
		}
	}
}
