package manifests

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/balancer"
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
	o := Options{Allocate: devRanges, Annotation: balancer.CheckAnnotation, MaxFileSize: 4096}
	r := must.Get(Inspect(paths, o, service.StoreOptions{EarlierFirst: true, OwnEndpoints: true}))(t)
	var lines strings.Builder
	for _, f := range r.Findings {
		lines.WriteString(filepath.Base(f.File))
		if f.Line > 0 {
			fmt.Fprintf(&lines, ":%d", f.Line)
		}
		lines.WriteString(": " + f.Severity + ": ")
		if f.Object != "" {
			lines.WriteString(f.Object + ": ")
		}
		lines.WriteString(f.Text + "\n")
	}
	return r, lines.String()
}

// mistake is an entry of testdata/mistakes.txt.
type mistake struct {
	name  string
	files map[string]string
	lines []string // "web.yaml:7", that findings must name; or files
}

func readMistakes(t *testing.T) (list []mistake) {
	t.Helper()
	text := must.Read(t, "testdata/mistakes.txt")
	for _, entry := range strings.Split(string(text), "\n== ")[1:] {
		name, rest, _ := strings.Cut(entry, "\n")
		m := mistake{name: name, files: make(map[string]string)}
		for _, part := range strings.Split("\n"+rest, "\n-- ")[1:] {
			file, content, _ := strings.Cut(part, " --\n")
			m.files[file] = content + "\n"
			n := 0
			for line := range strings.Lines(content) {
				if n++; strings.HasSuffix(strings.TrimSpace(line), " # <-") {
					m.lines = append(m.lines, fmt.Sprintf("%s:%d", file, n))
				}
			}
		}
		list = append(list, m)
	}
	return list
}

// TestInspect makes typical mistakes. Each is named, with the lines that are marked in the
// file, and with the text of the golden file.
func TestInspect(t *testing.T) {
	file := must.Get(filepath.Abs("testdata/mistakes.golden"))(t)
	var all strings.Builder
	mistakes := readMistakes(t)
	for _, m := range mistakes {
		dir := t.TempDir()
		for file, text := range m.files {
			write(t, filepath.Join(dir, file), text)
		}
		t.Chdir(dir)
		_, findings := inspect(t, ".")
		all.WriteString("== " + m.name + "\n" + findings)
		var named []string
		for line := range strings.Lines(findings) {
			if where, _, _ := strings.Cut(line, ": "); strings.Contains(where, ":") {
				named = append(named, where)
			}
		}
		slices.Sort(named)
		slices.Sort(m.lines)
		check.EqualSlicesf(t, slices.Compact(named), m.lines, "%s: what findings name", m.name)
	}
	if len(mistakes) < 41 {
		t.Errorf("%d mistakes", len(mistakes)-1)
	}
	golden(t, file, all.String())
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
	check.Textf(t, got, `C.YAML: warning: is not read: manifests are *.yaml, *.yml and *.json, in lower case
b.yaml.txt: warning: is not read: manifests are *.yaml, *.yml and *.json, in lower case
empty.yaml: warning: holds no object
gone.yaml: error: cannot be read: it is a symlink to a file that does not exist
kustomization.yaml: error: is for kustomize: run kubectl kustomize, and serve the result
large.yaml: error: has 4097 bytes, more than the 4096 that --max-manifest-size allows: make several files of it
loop: error: is a symlink to a directory that it is in itself: it is passed over
values.yaml: error: is part of a Helm chart: run helm template, and serve the result
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
