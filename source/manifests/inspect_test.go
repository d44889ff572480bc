package manifests

import (
	"fmt"
	"io/fs"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// inspected has a Service with pods and the annotation, and one with a slice. Nothing is wrong.
const inspected = `apiVersion: v1
kind: Service
metadata: {name: web, annotations: {sluice.dev/endpoints: "127.0.0.1:3000"}}
spec:
  clusterIP: 10.96.0.5
  selector: {app: web}
  ports: [{name: http, port: 80, targetPort: front}]
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: web}
spec:
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web, tier: a}}
    spec: {containers: [{name: logs}, {ports: [{name: front, containerPort: 5000}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: api}
spec:
  ports: [{port: 80, targetPort: 3000}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: api-1, labels: {kubernetes.io/service-name: api}}
addressType: IPv4
ports: [{port: 3000}]
endpoints: [{addresses: [10.0.0.7]}]
`

// inspect returns the report of files and directories, and its findings as lines.
func inspect(t *testing.T, paths ...string) (*Report, string) {
	t.Helper()
	o := Options{Allocate: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")}, MaxFileSize: 4096}
	r := must.Get(Inspect(paths, o, service.StoreOptions{OwnEndpoints: true}))(t)
	var lines strings.Builder
	for _, f := range r.Findings {
		fmt.Fprintf(&lines, "%s:%d: %s: %s: %s\n", filepath.Base(f.File), f.Line, f.Severity, f.Object, f.Text)
	}
	return r, lines.String()
}

// What is said about each mistake is in the golden file, for people to read.
func TestInspect(t *testing.T) {
	const (
		annotation = `, annotations: {sluice.dev/endpoints: "127.0.0.1:3000"}`
		target     = "targetPort: front"
		web        = "clusterIP: 10.96.0.5"
		api        = "name: api}\nspec:\n  ports: [{port: 80, targetPort: 3000}]"
		slicePort  = "[{port: 3000}]"
		pods       = "apiVersion: apps/v1\n"
		governed   = "  selector: {matchLabels"
		db         = "apiVersion: v1\nkind: Service\nmetadata: {name: db" + annotation +
			"}\nspec: {ports: [{port: 1}], selector: {app: db}}\n"
		job = "apiVersion: v1\nkind: Pod\nmetadata: {name: job, labels: {app: job}}\n" +
			"spec: {containers: [{ports: [{containerPort: 1}]}]}\n"
		cidr = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: a}\n" +
			"spec: {cidrs: [10.99.0.0/16]}\n"
	)
	var out strings.Builder
	for _, tt := range []struct{ name, old, new string }{
		{"right", "", ""},
		{"target port misspelled", target, "targetPort: frnt"},
		{"target port that no container has", target, "targetPort: 3001"},
		{"target port that the annotation replaces", target, "targetPort: 5000"},
		{"protocol of the Service", target, "protocol: UDP, targetPort: front"},
		{"protocol of the container", "containerPort: 5000", "containerPort: 5000, protocol: UDP"},
		{"cluster IP out of range", web, "clusterIP: 10.97.0.5"},
		{"second cluster IP out of range", web, "clusterIPs: [10.96.0.5, 'fd00::5']"},
		{"external IP that is left out, once", web, "externalIPs: [192.0.2.300]"},
		{"cluster IP of another Service", api, api + "\n  " + web},
		{"ServiceCIDR with neither cluster IP", pods, cidr + "---\n" + pods},
		{"ExternalName with an address", api, "name: api}\nspec: {type: ExternalName, externalName: 192.0.2.7}"},
		{"node port out of range", api, strings.Replace(api, "}]", ", nodePort: 8080}]\n  type: NodePort", 1)},
		{"selector misspelled", "selector: {app: web}\n", "selector: {app: wbe}\n"},
		{"pods in another namespace", "metadata: {name: web}", "metadata: {name: web, namespace: other}"},
		{"pods without labels", "{labels: {app: web, tier: a}}", "{}"},
		{"pods that another tool starts", pods, db + "---\n" + pods},
		{"pods that no Service selects", pods, job + "---\n" + pods},
		{"pods that are not started", annotation, ""},
		{"no endpoints", api, strings.NewReplacer("3000", "4000", "api", "db").Replace(api)},
		{"no endpoints and no ports", api, "name: db}\nspec: {clusterIP: None}"},
		{"headless, with other ports", api, "name: api}\nspec: {clusterIP: None, ports: [{port: 1}]}"},
		{"endpoint that is not ready", "[10.0.0.7]", "[10.0.0.7], conditions: {ready: false}"},
		{"another number of the endpoints", slicePort, "[{port: 3001}]"},
		{"another port of the endpoints", slicePort, "[{name: x, port: 3000}]"},
		{"another family of the endpoints", "IPv4\nports: [{port: 3000}]\nendpoints: [{addresses: [10.0.0.7]}]",
			"IPv6\nports: [{port: 3000}]\nendpoints: [{addresses: ['fd00::7']}]"},
		{"governing Service that does not exist", governed, "  serviceName: wb\n" + governed},
		{"governing Service that is not headless", governed, "  serviceName: web\n" + governed},
		{"template", "kind: StatefulSet", "kind: {{ .Values.kind }}"},
	} {
		file := filepath.Join(t.TempDir(), "a.yaml")
		if !strings.Contains(inspected, tt.old) {
			t.Errorf("%s: the manifest has no %q", tt.name, tt.old)
		}
		write(t, file, strings.Replace(inspected, tt.old, tt.new, 1))
		_, findings := inspect(t, file)
		out.WriteString("== " + tt.name + "\n" + findings)
	}
	golden(t, filepath.Join("testdata", "inspect.golden"), out.String())
}

// A directory's files are read as a Watcher reads them, and what is not read is named.
func TestInspectDirectory(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"a.yaml": inspected, "b.yaml.txt": "", "C.YAML": "", "empty.yaml": "# nothing\n", "readme.md": "",
		"pods.json": `{"apiVersion": "v1", "kind": "Pod"}`, "values.yaml": "image: web",
		"kustomization.yaml": "resources: [a.yaml]", "large.yaml": strings.Repeat("#", 4097),
	} {
		write(t, filepath.Join(dir, name), text)
	}
	symlink(t, "nowhere", filepath.Join(dir, "gone.yaml"))
	symlink(t, ".", filepath.Join(dir, "loop"))
	r, got := inspect(t, dir, filepath.Join(dir, "b.yaml.txt"))
	check.Textf(t, got, `C.YAML:0: warning: : is not read: manifests are *.yaml, *.yml and *.json, in lower case
b.yaml.txt:0: warning: : is not read: manifests are *.yaml, *.yml and *.json, in lower case
empty.yaml:0: warning: : holds no object
gone.yaml:0: error: : cannot be read: it is a symlink to a file that does not exist
kustomization.yaml:0: error: : is for kustomize: run kubectl kustomize, and serve the result
large.yaml:0: error: : has 4097 bytes, more than the 4096 that --max-manifest-size allows: make several files of it
loop:0: error: : is a symlink to a directory that it is in itself: it is passed over
values.yaml:0: error: : is part of a Helm chart: run helm template, and serve the result
`, "findings")
	names := ""
	for _, s := range r.Services {
		names += fmt.Sprintln(s.Name, s.Spec.ClusterIPs)
	}
	check.Equalf(t, names, "api [10.96.81.24]\nweb [10.96.0.5]\n", "Services in force")
	check.Equalf(t, r.Files, 7, "files")
	check.Equalf(t, len(r.Snapshot.Ports), 2, "ports of the model")
	_, err := Inspect([]string{dir, filepath.Join(dir, "none.yaml")}, Options{}, service.StoreOptions{})
	check.ErrorIsf(t, err, fs.ErrNotExist, "a path that does not exist")
	// Without OwnEndpoints the Store takes no loopback. The Service is named, not the slice that nobody wrote.
	file := filepath.Join(dir, "a.yaml")
	r = must.Get(Inspect([]string{file}, Options{Allocate: devRanges}, service.StoreOptions{}))(t)
	check.EqualSlices(t, r.Findings, []Finding{{file, 1, Warning, "Service default/web",
		"address 127.0.0.1 cannot be an endpoint's, it is a loopback address: left out (A1.7)"}})
}
