package manifests

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/internal/nearest"
	"github.com/sluice-proxy/sluice/service"
)

// kind is a kind of API object that manifests may hold, as the API spells it. The
// model has all of them but Endpoints, which become EndpointSlices.
type kind string

const (
	kindService       kind = "Service"
	kindEndpointSlice kind = "EndpointSlice"
	kindEndpoints     kind = "Endpoints"
	kindNode          kind = "Node"
	kindServiceCIDR   kind = "ServiceCIDR"
)

// kinds says in which API version each kind is read, and makes an empty one.
var kinds = map[kind]struct {
	apiVersion string
	namespaced bool
	model      service.ObjectKind
	make       func() metav1.Object
}{
	kindService:       {"v1", true, service.KindService, func() metav1.Object { return new(corev1.Service) }},
	kindEndpointSlice: {"discovery.k8s.io/v1", true, service.KindEndpointSlice, func() metav1.Object { return new(discoveryv1.EndpointSlice) }},
	kindEndpoints:     {"v1", true, 0, func() metav1.Object { return new(endpoints) }},
	kindNode:          {"v1", false, service.KindNode, func() metav1.Object { return new(corev1.Node) }},
	kindServiceCIDR:   {"networking.k8s.io/v1", false, service.KindServiceCIDR, func() metav1.Object { return new(networkingv1.ServiceCIDR) }},
}

// objectKey names an object of the manifests.
type objectKey struct {
	kind kind
	service.Name
}

// String returns "Service default/web", "Node a".
func (k objectKey) String() string {
	if k.Namespace == "" {
		return string(k.kind) + " " + k.Name.Name
	}
	return string(k.kind) + " " + k.Name.String()
}

// object is one object of a file.
type object struct {
	key   objectKey
	line  int
	value metav1.Object
	lines *sliceLines // of an EndpointSlice
	node  *yaml.Node  // for Inspect, else nil
}

// content is what a file holds.
type content struct {
	objects    []object
	passedOver map[string]int // other kinds, counted by kind
	workloads  []*workload    // for Inspect
}

// maxFindings bounds the errors, and the warnings, that are reported for a file;
// further ones are counted.
const maxFindings = 10

// decoder reads one file.
type decoder struct {
	file     string
	content  content
	findings []finding
	// warned holds the places of warnings without their indices, so that a field
	// that a thousand objects have is reported once.
	warned map[string]*repeated
	fill   filler
	// annotation is Options.Annotation, which may be nil.
	annotation func(name, value string) error
	allocates  bool   // Services get cluster IPs
	inspects   bool   // for Inspect
	object     string // the one being read
	at         string // where it is in a list, "items[3]"
}

// repeated counts a warning that applies to several places of a file.
type repeated struct {
	index int // of the first, in findings
	more  int
}

// decode reads a file's data. The name decides between YAML and JSON and is part of
// the findings. If a finding is an error, the content must not be used. The
// content's objects have the API server's defaults.
func decode(name string, data []byte, o Options) (content, []finding) {
	d := newDecoder(name, len(data), o)
	parse := parseYAML
	if path.Ext(name) == ".json" {
		parse = parseJSON
	}
	if err := parse(data, func(n *yaml.Node) { d.document(n, "", 0) }); err != nil {
		f := finding{file: name, text: err.Error()}
		var se *syntaxError
		if errors.As(err, &se) {
			f.line = se.line
		}
		d.findings = append(d.findings, f)
	}
	return d.content, d.told()
}

// newDecoder makes a decoder of a file with so many bytes.
func newDecoder(name string, size int, o Options) *decoder {
	d := &decoder{file: name, warned: make(map[string]*repeated), annotation: o.Annotation, allocates: len(o.Allocate) > 0, inspects: o.inspects}
	d.content.passedOver = make(map[string]int)
	d.fill.report = d.reportField
	// As JSON, a file without aliases is some times as large at the most.
	d.fill.budget = 8*size + 100_000
	return d
}

func (d *decoder) errorf(line int, format string, args ...any) {
	d.findings = append(d.findings, finding{file: d.file, line: line, object: d.object, text: fmt.Sprintf(format, args...)})
}

func (d *decoder) warnf(line int, format string, args ...any) {
	d.findings = append(d.findings, finding{file: d.file, line: line, object: d.object, text: fmt.Sprintf(format, args...), warning: true})
}

// reportField is the filler's report function.
func (d *decoder) reportField(line int, path, text string, warning bool) {
	if path != "" {
		text = path + ": " + text
	}
	if !warning {
		d.errorf(line, "%s", text)
		return
	}
	place := d.object[:max(0, strings.IndexByte(d.object, ' '))] + withoutIndices(text)
	if r, ok := d.warned[place]; ok && !d.inspects {
		r.more++
		return
	}
	d.warned[place] = &repeated{index: len(d.findings)}
	d.warnf(line, "%s", text)
}

// withoutIndices returns "spec.ports[].name" for "spec.ports[3].name".
func withoutIndices(path string) string {
	var b strings.Builder
	inside := false
	for _, r := range path {
		switch {
		case r == '[':
			inside = true
		case r == ']':
			inside = false
		case inside:
			continue
		}
		b.WriteRune(r)
	}
	return b.String()
}

// told returns a bounded number of findings in the order of the file.
func (d *decoder) told() []finding {
	for _, r := range d.warned {
		if r.more > 0 {
			d.findings[r.index].text += fmt.Sprintf(" (and %d more like it)", r.more)
		}
	}
	slices.SortStableFunc(d.findings, func(a, b finding) int { return a.line - b.line })
	if d.inspects {
		return d.findings
	}
	var out []finding
	wrong, warnings := 0, 0
	for _, f := range d.findings {
		if f.warning {
			if warnings++; warnings > maxFindings {
				continue
			}
		} else if wrong++; wrong > maxFindings {
			continue
		}
		out = append(out, f)
	}
	if n := wrong - maxFindings; n > 0 {
		out = append(out, finding{file: d.file, text: fmt.Sprintf("%d more errors", n)})
	}
	if n := warnings - maxFindings; n > 0 {
		out = append(out, finding{file: d.file, text: fmt.Sprintf("%d more warnings", n), warning: true})
	}
	return out
}

// document reads an object or a list of objects. The items of a ServiceList may have
// no kind of their own; it is itemKind then.
func (d *decoder) document(n *yaml.Node, itemKind string, depth int) {
	d.object = d.at
	if n = d.fill.enter(n); n == nil {
		return
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return // nothing between two "---"
	}
	if n.Kind != yaml.MappingNode {
		d.errorf(n.Line, "is %s where a Kubernetes object is wanted", describe(n))
		return
	}
	kindName, apiVersion := scalar(n, "kind"), scalar(n, "apiVersion")
	if kindName == "" && itemKind != "" {
		kindName, apiVersion = itemKind, kinds[kind(itemKind)].apiVersion
	}
	switch {
	case kindName == "":
		d.errorf(n.Line, "kind is missing: what is not a Kubernetes object does not belong here")
		return
	case apiVersion == "":
		d.errorf(n.Line, "apiVersion is missing%s", wantedVersion(kindName))
		return
	}
	if items := field(n, "items"); items != nil && strings.HasSuffix(kindName, "List") {
		d.list(items, strings.TrimSuffix(kindName, "List"), depth)
		return
	}
	if d.inspects {
		if w := workloadOf(n, kindName); w != nil {
			d.content.workloads = append(d.content.workloads, w)
		}
	}
	k, ok := kinds[kind(kindName)]
	switch {
	case !ok:
		d.content.passedOver[kindName]++
		d.misspelt(n, kindName, apiVersion)
		return
	case group(apiVersion) != group(k.apiVersion):
		d.content.passedOver[kindName+"."+group(apiVersion)]++ // somebody else's kind of that name
		d.misspelt(n, kindName, apiVersion)
		return
	case apiVersion != k.apiVersion:
		d.content.passedOver[kindName]++
		d.warnf(n.Line, "%s of apiVersion %s is passed over%s", kindName, quotedText(apiVersion), wantedVersion(kindName))
		return
	}
	d.one(n, kind(kindName))
}

// misspelt warns of an object in one of our kinds' groups that is almost of that kind.
func (d *decoder) misspelt(n *yaml.Node, kindName, apiVersion string) {
	for _, k := range kinds {
		if group(apiVersion) != group(k.apiVersion) {
			continue
		}
		if name := nearest.Name(kindName, 2, kindNames); name != "" {
			d.warnf(n.Line, "%s of apiVersion %s is passed over; did you mean %s of apiVersion %s?", quotedText(kindName), quotedText(apiVersion), name, kinds[kind(name)].apiVersion)
		}
		return
	}
}

// kindNames yields the names of the kinds.
func kindNames(yield func(string) bool) {
	for k := range kinds {
		if !yield(string(k)) {
			return
		}
	}
}

// list reads the items of a List.
func (d *decoder) list(items *yaml.Node, itemKind string, depth int) {
	if items = d.fill.enter(items); items == nil {
		return
	}
	if items.Kind == yaml.ScalarNode && items.Tag == "!!null" {
		return
	}
	if items.Kind != yaml.SequenceNode || depth > 2 {
		d.errorf(items.Line, "items is not a list of objects")
		return
	}
	if _, ok := kinds[kind(itemKind)]; !ok {
		if itemKind != "" {
			d.content.passedOver[itemKind] += len(items.Content)
			return
		}
	}
	outer := d.at
	for i, item := range items.Content {
		d.at = fmt.Sprintf("items[%d]", i)
		d.document(item, itemKind, depth+1)
	}
	d.at = outer
}

// one reads an object of a kind that is known.
func (d *decoder) one(n *yaml.Node, k kind) {
	info := kinds[k]
	key := objectKey{kind: k}
	if meta := field(n, "metadata"); meta != nil {
		key.Name.Name = scalar(meta, "name")
		if info.namespaced {
			key.Namespace = scalar(meta, "namespace")
		}
	}
	if info.namespaced && key.Namespace == "" {
		key.Namespace = metav1.NamespaceDefault
	}
	if key.Name.Name == "" {
		d.object = string(k) + " without a name"
	} else {
		d.object = key.String()
	}
	before := len(d.findings)
	v := info.make()
	d.fill.object(n, v)
	if hasErrors(d.findings[before:]) {
		return // what was not read cannot be judged
	}
	v.SetManagedFields(nil) // large, and of no use to a proxy
	if node, ok := v.(*corev1.Node); ok {
		node.Status.Images = nil // likewise
	}
	if info.namespaced && v.GetNamespace() == "" {
		v.SetNamespace(metav1.NamespaceDefault)
	}
	key.Name = service.Name{Namespace: v.GetNamespace(), Name: v.GetName()}
	c := checker{d: d, node: n}
	c.check(v, info.namespaced)
	o := object{key: key, line: n.Line, value: v, lines: linesOf(n, v)}
	if d.inspects {
		o.node = n
	}
	d.content.objects = append(d.content.objects, o)
}

// sliceLines are the lines of what a slice says of its Service.
type sliceLines struct {
	service int   // of the label with its name
	ports   []int // in order
}

// linesOf returns the lines of an EndpointSlice, and nil for other objects.
func linesOf(n *yaml.Node, v metav1.Object) *sliceLines {
	slice, ok := v.(*discoveryv1.EndpointSlice)
	if !ok {
		return nil
	}
	l := &sliceLines{service: lineOf(n, "metadata.labels["+discoveryv1.LabelServiceName+"]"), ports: make([]int, len(slice.Ports))}
	for i := range slice.Ports {
		l.ports[i] = lineOf(n, fmt.Sprintf("ports[%d].name", i))
	}
	return l
}

// field returns the value of a mapping's key, or nil. It follows aliases.
func field(n *yaml.Node, name string) *yaml.Node {
	n = follow(n)
	if n.Kind != yaml.MappingNode {
		return nil
	}
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Value == name {
			return follow(n.Content[i+1])
		}
	}
	return nil
}

// lineOf returns the line of a field such as "spec.ports[0].port", or of its nearest
// parent if the field does not exist. Of two fields with one name it is the second's.
func lineOf(n *yaml.Node, path string) int {
	n = follow(n)
	line := n.Line
	for path != "" {
		var part, rest string
		if path[0] == '[' {
			part, rest, _ = strings.Cut(path[1:], "]")
		} else if end := strings.IndexAny(path, ".["); end >= 0 {
			part, rest = path[:end], path[end:]
		} else {
			part = path
		}
		var next *yaml.Node
		switch n.Kind {
		case yaml.SequenceNode:
			if i, err := strconv.Atoi(part); err == nil && i < len(n.Content) {
				line, next = n.Content[i].Line, n.Content[i]
			}
		case yaml.MappingNode:
			for i := 0; i+1 < len(n.Content); i += 2 {
				if n.Content[i].Value == part || n.Content[i].Value == path { // a label's name may hold dots
					line, next = n.Content[i].Line, n.Content[i+1]
				}
			}
		}
		if next == nil {
			break
		}
		n, path = follow(next), strings.TrimPrefix(rest, ".")
	}
	return line
}

// follow returns the node that an alias stands for.
func follow(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

// scalar returns the text of a mapping's key, "" if there is none.
func scalar(n *yaml.Node, name string) string {
	if v := field(n, name); v != nil && v.Kind == yaml.ScalarNode && v.Tag != "!!null" {
		return v.Value
	}
	return ""
}

// group returns the API group of an apiVersion.
func group(apiVersion string) string {
	if g, _, ok := strings.Cut(apiVersion, "/"); ok {
		return g
	}
	return ""
}

// wantedVersion returns ": write apiVersion: v1", or "" for an unknown kind.
func wantedVersion(kindName string) string {
	if k, ok := kinds[kind(kindName)]; ok {
		return ": write apiVersion: " + k.apiVersion
	}
	return ""
}
