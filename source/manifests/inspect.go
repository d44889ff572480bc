package manifests

import (
	"cmp"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/sluice-proxy/sluice/service"
)

// Report is what Inspect finds.
type Report struct {
	Files    int               // that were read
	Services []*corev1.Service // in force, with cluster IPs, by namespace and name
	Snapshot *service.Snapshot
	Findings []Finding // by file and line
}

// Finding is one mistake in manifests.
type Finding struct {
	File string `json:"file"` // as it was given, or below a directory as that was given
	Line int    `json:"line,omitempty"`
	// Severity is "error" for what keeps the file from being used, and "warning" for what
	// probably has another effect than its author wants.
	Severity string `json:"severity"`
	Object   string `json:"object,omitempty"` // such as "Service shop/web"
	Text     string `json:"text"`             // what is wrong and what would be right
}

// The values of Finding.Severity.
const (
	Error   = "error"
	Warning = "warning"
)

// Inspect reads files and directories once, and returns everything that is wrong with them:
// what a Watcher would log, what a Store with these options would report, and what
// Kubernetes allows though nobody wants it. Objects with pods, such as Deployments, are read
// too: their labels and ports say what selectors and target ports mean. The error is that of
// a path that does not exist.
func Inspect(paths []string, o Options, store service.StoreOptions) (*Report, error) {
	o.inspects = true
	if o.MaxFileSize <= 0 {
		o.MaxFileSize = DefaultMaxFileSize
	}
	i := &inspector{options: o, catalog: newCatalog(o.Allocate), report: &Report{}}
	for _, path := range paths {
		if err := i.path(path); err != nil {
			return nil, err
		}
	}
	change, findings := i.catalog.commit()
	i.findings = append(i.findings, findings...)
	i.findings = append(i.findings, i.catalog.strays(time.Time{}, true)...)
	i.report.Snapshot = service.NewStore(store).Apply(change)
	i.problems(i.report.Snapshot.Problems)
	i.lint()
	return i.finish(), nil
}

// inspector is one call of Inspect.
type inspector struct {
	options   Options
	catalog   *catalog
	calls     calls
	workloads []placedWorkload
	findings  []finding
	report    *Report
}

// placedWorkload is a workload and its file.
type placedWorkload struct {
	file string
	*workload
}

// path reads a file, or the files of a directory.
func (i *inspector) path(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		if !isManifest(path) {
			i.notManifest(path)
			return nil
		}
		i.file(path, nil)
		return nil
	}
	t, err := walk(path, &i.calls, func(string) {})
	if err != nil {
		return err
	}
	for _, f := range t.findings {
		f.file = filepath.Join(path, f.file)
		i.findings = append(i.findings, f)
	}
	for _, name := range t.near {
		i.notManifest(filepath.Join(path, name))
	}
	for _, f := range t.files {
		i.file(filepath.Join(path, f.path), f.err)
	}
	return nil
}

func (i *inspector) notManifest(path string) {
	i.warn(path, 0, "", "is not read: manifests are *.yaml, *.yml and *.json, in lower case")
}

// file reads a file of the tree. err is why it cannot be read, if that is known.
func (i *inspector) file(path string, err error) {
	i.report.Files++
	var data []byte
	if err == nil {
		data, _, err = readFile(path, i.options.MaxFileSize)
	}
	if err != nil {
		text := err.Error()
		if !errors.As(err, new(tooLargeError)) {
			text = ioText(err)
		}
		i.findings = append(i.findings, finding{file: path, text: text})
		return
	}
	content, findings := decode(path, data, i.options)
	if hasErrors(findings) {
		if hint := notKubernetes(path, data); hint != "" {
			if len(content.objects) > 0 {
				findings = append(findings, finding{file: path, text: hint})
			} else {
				findings = []finding{{file: path, text: hint}}
			}
		}
	} else {
		i.catalog.set(path, content.objects)
	}
	i.findings = append(i.findings, findings...)
	for _, w := range content.workloads {
		i.workloads = append(i.workloads, placedWorkload{path, w})
	}
	if len(findings)+len(content.objects)+len(content.passedOver) == 0 {
		i.warn(path, 0, "", "holds no object")
	}
}

// notKubernetes says what a file is that other tools make manifests of, or returns "".
func notKubernetes(path string, data []byte) string {
	switch base := filepath.Base(path); {
	case strings.Contains(string(data), "{{"):
		return "is a template: render it first, as with helm template, and serve the result"
	case base == "kustomization.yaml" || base == "kustomization.yml":
		return "is for kustomize: run kubectl kustomize, and serve the result"
	case base == "Chart.yaml" || base == "values.yaml":
		return "is part of a Helm chart: run helm template, and serve the result"
	}
	return ""
}

func (i *inspector) warn(file string, line int, object, text string) {
	i.findings = append(i.findings, finding{file: file, line: line, object: object, text: text, warning: true})
}

// problems adds those of the model that the files' own findings do not have.
func (i *inspector) problems(list []service.Problem) {
	leftOut := make(map[string]bool)
	for _, f := range i.findings {
		if strings.HasSuffix(f.text, ": left out") {
			leftOut[f.object] = true
		}
	}
	for _, p := range list {
		if strings.HasSuffix(p.Text, "left out (A1.7)") && leftOut[p.Object] {
			continue // told with its line
		}
		key := i.source(keyOf(p.Object))
		if cl := i.catalog.claims[key]; len(cl) > 0 {
			i.warn(cl[0].file, cl[0].line, key.String(), p.Text)
		}
	}
}

// source returns the object that a file has: of a slice that was made from Endpoints or
// from an annotation, that object.
func (i *inspector) source(k objectKey) objectKey {
	for name, made := range i.catalog.mirrored {
		if made[k] == nil {
			continue
		}
		if k = (objectKey{kindEndpoints, name}); i.catalog.inForce[k] == nil {
			k.kind = kindService
		}
		break
	}
	return k
}

// ranges returns those of cluster IPs: what ServiceCIDRs say, else those of the options.
func (i *inspector) ranges() (list []netip.Prefix) {
	for k, v := range i.catalog.inForce {
		if k.kind != kindServiceCIDR {
			continue
		}
		for _, text := range v.(*networkingv1.ServiceCIDR).Spec.CIDRs {
			if r, err := netip.ParsePrefix(text); err == nil {
				list = append(list, r)
			}
		}
	}
	if len(list) == 0 {
		list = i.options.Allocate
	}
	return list
}

// services returns the Services in force, in order.
func (i *inspector) services() (list []placedService) {
	for k, v := range i.catalog.inForce {
		if svc, ok := v.(*corev1.Service); ok {
			list = append(list, placedService{i.catalog.claims[k][0], k, svc})
		}
	}
	slices.SortFunc(list, func(a, b placedService) int { return compareKeys(a.key, b.key) })
	return list
}

// finish sorts the findings, and leaves out what is there twice.
func (i *inspector) finish() *Report {
	for _, s := range i.services() {
		i.report.Services = append(i.report.Services, s.Service)
	}
	slices.SortStableFunc(i.findings, func(a, b finding) int {
		return cmp.Or(strings.Compare(a.file, b.file), cmp.Compare(a.line, b.line))
	})
	for _, f := range slices.Compact(i.findings) {
		out := Finding{File: f.file, Line: f.line, Severity: Error, Object: f.object, Text: f.text}
		if f.warning {
			out.Severity = Warning
		}
		i.report.Findings = append(i.report.Findings, out)
	}
	return i.report
}
