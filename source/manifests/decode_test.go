package manifests

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	sigsyaml "sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// one decodes a file of one object that must be in order.
func one[T any](t *testing.T, name, text string) T {
	t.Helper()
	c, findings := decode(name, []byte(text), Options{})
	if len(findings) > 0 || len(c.objects) != 1 {
		t.Fatalf("%d objects, %v", len(c.objects), findings)
	}
	return c.objects[0].value.(T)
}

func TestServiceDefaults(t *testing.T) {
	s := one[*corev1.Service](t, "a.yaml", `
apiVersion: v1
kind: Service
metadata: {name: web}
spec:
  clusterIPs: [10.96.0.1, "fd00::1"]
  sessionAffinity: ClientIP
  ports:
  - port: 80
    name: a
  - {port: 81, name: b, targetPort: http, protocol: UDP}
`)
	got := fmt.Sprintf("%s %s %s %v %d %s", s.Namespace, s.Spec.Type, s.Spec.ClusterIP, s.Spec.ClusterIPs,
		*s.Spec.SessionAffinityConfig.ClientIP.TimeoutSeconds, *s.Spec.InternalTrafficPolicy)
	for _, p := range s.Spec.Ports {
		got += fmt.Sprintf(" %s:%d/%s->%s", p.Name, p.Port, p.Protocol, p.TargetPort.String())
	}
	const want = "default ClusterIP 10.96.0.1 [10.96.0.1 fd00::1] 10800 Cluster a:80/TCP->80 b:81/UDP->http"
	check.Textf(t, got, want, "decoded")
}

func TestEndpointSliceDefaults(t *testing.T) {
	s := one[*discoveryv1.EndpointSlice](t, "a.yaml", slc("web", "web-1", "10.1.0.1"))
	if p := s.Ports[0]; *p.Name != "" || *p.Protocol != corev1.ProtocolTCP {
		t.Errorf("%v", p)
	}
	if c := s.Endpoints[0].Conditions; c.Ready != nil || c.Serving != nil || c.Terminating != nil {
		t.Errorf("the conditions' defaults are the model's affair (A1.12): %v", c)
	}
}

// What the API server takes although it looks odd.
func TestLeniency(t *testing.T) {
	for name, text := range map[string]string{
		"leading zeros (A1.7)":        strings.Replace(svc("a", "10.96.000.010"), "ports", "externalIPs: [010.0.0.1]\n  ports", 1),
		"no ports, headless":          "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIP: None}",
		"external name":               "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {type: ExternalName, externalName: example.com}",
		"a name that begins with 1":   svc("1a", "10.96.0.1"),
		"one number, two protocols":   "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIP: 10.96.0.1, ports: [{name: a, port: 53}, {name: b, port: 53, protocol: UDP}]}",
		"a slice without ports":       "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a, labels: {kubernetes.io/service-name: a}}\naddressType: IPv6\nendpoints: []\nports: null",
		"a slice of names":            strings.Replace(slc("a", "a-1", "backend.example.com"), "IPv4", "FQDN", 1),
		"nulls":                       "apiVersion: v1\nkind: Service\nmetadata: {name: a, creationTimestamp: null, labels: null}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80, targetPort: null}], selector: ~}\nstatus: {loadBalancer: {}}",
		"yes and no":                  strings.Replace(slc("a", "a-1", "10.1.0.1"), "]\n", "]\n  conditions: {ready: yes, serving: No, terminating: off}\n", 1),
		"a time without quotes":       strings.Replace(svc("a", "10.96.0.1"), "  name: a\n", "  name: a\n  creationTimestamp: 2026-01-02T03:04:05Z\n", 1),
		"anchors and merged mappings": "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  clusterIP: 10.96.0.1\n  ports:\n  - &p {port: 80, name: a, protocol: TCP}\n  - {<<: *p, name: b, port: 81}",
		"windows line ends":           strings.ReplaceAll(svc("a", "10.96.0.1"), "\n", "\r\n"),
		"a byte order mark":           "\ufeff" + svc("a", "10.96.0.1"),
		"a document end":              svc("a", "10.96.0.1") + "...\n---\n",
	} {
		if c, findings := decode("a.yaml", []byte(text), Options{}); len(findings) > 0 || len(c.objects) != 1 {
			t.Errorf("%s: %d objects, %v", name, len(c.objects), findings)
		}
	}
}

// One address of several that is none costs itself alone, and a warning (A1.7).
func TestBadEntriesAreLeftOut(t *testing.T) {
	with := func(fields string) string {
		return strings.Replace(svc("a", "10.96.0.1"), "ports", fields+"\n  ports", 1)
	}
	for text, want := range map[string]string{
		with("externalIPs: [192.0.2.1, 192.0.2.300]"):                            `a.yaml:7: Service default/a: spec.externalIPs[1]: "192.0.2.300" is not an IP address: left out`,
		with("externalIPs: [web.example.com]"):                                   `a.yaml:7: Service default/a: spec.externalIPs[0]: "web.example.com" is a name, not an IP address: names are not looked up: left out`,
		"apiVersion: v1\nkind: Node\nmetadata: {name: n}\nspec: {podCIDRs: [x]}": `a.yaml:4: Node n: spec.podCIDRs[0]: "x" is not a range of addresses such as "10.0.0.0/8" or "fd00::/48": left out`,
	} {
		c, findings := decode("a.yaml", []byte(text), Options{})
		if len(findings) != 1 || !findings[0].warning || findings[0].String() != want || len(c.objects) != 1 {
			t.Errorf("A1.7: %d objects, got %v\nwant %s", len(c.objects), findings, want)
		}
	}
}

// A restriction that cannot be read is an error: the Service is not served, and file and
// line say why. The rules are the API server's.
func TestInvalidRestrictionsAreRefused(t *testing.T) {
	const head = "apiVersion: v1\nkind: Service\nmetadata: {name: a%s}\nspec:\n  clusterIP: 10.96.0.1\n  ports: [{port: %s}]\n"
	spec := func(fields string) string { return fmt.Sprintf(head, "", "80") + "  " + fields }
	annotated := func(annotation, fields string) string {
		return fmt.Sprintf(head, ", annotations: {"+annotation+"}", "80") + "  " + fields
	}
	const balancer = "type: LoadBalancer\n  "
	for _, tt := range []struct{ text, want string }{
		{spec(balancer + "loadBalancerSourceRanges: [10.9.9.0/33]"), `8: Service default/a: spec.loadBalancerSourceRanges[0]: "10.9.9.0/33" is not a range`},
		{spec(balancer + `loadBalancerSourceRanges: ["10.0.0.0/8,10.1.0.0/16"]`), `8: Service default/a: spec.loadBalancerSourceRanges[0]: "10.0.0.0/8,10.1.0.0/16" is not a range`},
		{spec(balancer + `loadBalancerSourceRanges: ["10.0.0.0/8", ""]`), `8: Service default/a: spec.loadBalancerSourceRanges[1]: "" is not a range`},
		{spec("loadBalancerSourceRanges: [10.0.0.0/8]"), "7: Service default/a: spec.loadBalancerSourceRanges: is for services of type LoadBalancer only"},
		{spec(balancer + "loadBalancerSourceRange: [10.0.0.0/8]"), `8: Service default/a: spec.loadBalancerSourceRange: no such field; did you mean "loadBalancerSourceRanges"?`},
		{spec("externalTraficPolicy: Local"), `7: Service default/a: spec.externalTraficPolicy: no such field; did you mean "externalTrafficPolicy"?`},
		{annotated(`service.beta.kubernetes.io/load-balancer-source-ranges: "10.0.0.0/8,x"`, balancer), `"x" is not a range`},
		{annotated(`service.beta.kubernetes.io/load-balancer-source-ranges: "10.0.0.0/8"`, ""), `is for services of type LoadBalancer only`},
		{spec("externalTrafficPolicy: Local"), "7: Service default/a: spec.externalTrafficPolicy: is for services with addresses outside of the cluster"},
		{spec("externalTrafficPolicy: local"), `7: Service default/a: spec.externalTrafficPolicy: "local" is not known`},
		{spec("internalTrafficPolicy: Any"), `7: Service default/a: spec.internalTrafficPolicy: "Any" is not known`},
		{spec(`internalTrafficPolicy: ""`), `7: Service default/a: spec.internalTrafficPolicy: "" is not known`},
		{spec("trafficDistribution: PreferNear"), `7: Service default/a: spec.trafficDistribution: "PreferNear" is not known`},
		{spec("sessionAffinity: Cookie"), `7: Service default/a: spec.sessionAffinity: "Cookie" is not known`},
		{spec("sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}"), "7: Service default/a: spec.sessionAffinityConfig: is for sessionAffinity: ClientIP only"},
		{spec("sessionAffinity: None\n  sessionAffinityConfig: {}"), "8: Service default/a: spec.sessionAffinityConfig: is for sessionAffinity: ClientIP only"},
		{spec("healthCheckNodePort: 31000"), "7: Service default/a: spec.healthCheckNodePort: is for services of type LoadBalancer with externalTrafficPolicy: Local"},
		{spec(balancer + "externalTrafficPolicy: Local\n  healthCheckNodePort: 70000"), "9: Service default/a: spec.healthCheckNodePort: 70000 is not in 1..65535"},
		{spec("loadBalancerClass: example.com/a"), "7: Service default/a: spec.loadBalancerClass: is for services of type LoadBalancer only"},
		{spec("allocateLoadBalancerNodePorts: false"), "7: Service default/a: spec.allocateLoadBalancerNodePorts: is for services of type LoadBalancer only"},
		{spec("ipFamilyPolicy: Dual"), `7: Service default/a: spec.ipFamilyPolicy: "Dual" is not known`},
		{spec("ipFamilies: [IPv4, IPv4]"), "7: Service default/a: spec.ipFamilies: names a family twice"},
		{spec("ipFamilyPolicy: SingleStack\n  clusterIPs: [10.96.0.1, 'fd00::1']"), "8: Service default/a: spec.clusterIPs: has 2 addresses: one is the limit"},
		{fmt.Sprintf(head, "", "10250") + "  " + balancer, "6: Service default/a: spec.ports[0].port: 10250 is the kubelet's port"},
		{strings.Replace(spec("type: NodePort"), "10.96.0.1", "None", 1), "5: Service default/a: spec.clusterIP: is None: a service of type NodePort needs an address"},
		{annotated("sluice.dev/topology-keys: 'a b/c d/e!'", ""), `3: Service default/a: metadata.annotations[sluice.dev/topology-keys]: no node label can have the key`},
		{annotated("sluice.dev/topology-keys: '*,a/b'", ""), `it has keys after "*"`},
		{annotated("sluice.dev/topology-keys: a/b", balancer+"externalTrafficPolicy: Local"), `exclude each other`},
		{strings.Replace(slc("a", "a-1", "10.1.0.1"), "]\n", "]\n  condition: {ready: false}\n", 1), `endpoints[0].condition: no such field; did you mean "conditions"?`},
		{strings.Replace(slc("a", "a-1", "10.1.0.1"), "]\n", "]\n  conditions: {redy: false}\n", 1), `endpoints[0].conditions.redy: no such field; did you mean "ready"?`},
	} {
		_, findings := decode("a.yaml", []byte(tt.text), Options{})
		if !slices.ContainsFunc(findings, func(f finding) bool {
			return !f.warning && strings.HasPrefix(f.String(), "a.yaml:") && strings.Contains(f.String(), tt.want)
		}) {
			t.Errorf("%s\ngot  %v\nwant %s", tt.text, findings, tt.want)
		}
	}
	text := annotated(`service.beta.kubernetes.io/load-balancer-source-ranges: "10.0.0.0/8"`, balancer)
	if _, findings := decode("a.yaml", []byte(text), Options{}); len(findings) != 1 || !findings[0].warning || !strings.Contains(findings[0].String(), "has no effect here") {
		t.Errorf("the annotation of cloud providers: %v", findings)
	}
}

func TestLists(t *testing.T) {
	service := `{"metadata": {"name": "%s"}, "spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}}`
	for text, want := range map[string]string{
		// A ServiceList as the API gives it: the items have no kind.
		`{"apiVersion": "v1", "kind": "ServiceList", "items": [` + fmt.Sprintf(service, "a") + "," + fmt.Sprintf(service, "b") + `]}`: "[Service default/a Service default/b] map[]",
		`{"apiVersion": "v1", "kind": "List", "items": null}`:                                                                         "[] map[]",
		`{"apiVersion": "v1", "kind": "List", "items": []} {"apiVersion": "v1", "kind": "PodList", "items": [{}, {}, {}]}`:            "[] map[Pod:3]",
		`{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "v1", "kind": "Pod"},
			{"apiVersion": "v1", "kind": "List", "items": [{"apiVersion": "v1", "kind": "Node", "metadata": {"name": "n"}}]}]}`: "[Node n] map[Pod:1]",
	} {
		c, findings := decode("a.json", []byte(text), Options{})
		var keys []string
		for _, o := range c.objects {
			keys = append(keys, o.key.String())
		}
		if got := fmt.Sprint(keys, c.passedOver); got != want || len(findings) > 0 {
			t.Errorf("%s: %s, %v", text, got, findings)
		}
	}
}

// An object that is almost of one of our kinds is passed over, with a warning; one of
// another kind, or of somebody else's kind of that name, is not worth a line.
func TestMisspeltKinds(t *testing.T) {
	for text, want := range map[string]string{
		"apiVersion: discovery.k8s.io/v1\nkind: Endpointslices": `a.yaml:1: "Endpointslices" of apiVersion "discovery.k8s.io/v1" is passed over; did you mean EndpointSlice of apiVersion discovery.k8s.io/v1?`,
		"apiVersion: v1\nkind: EndpointSlice":                   `a.yaml:1: "EndpointSlice" of apiVersion "v1" is passed over; did you mean EndpointSlice of apiVersion discovery.k8s.io/v1?`,
		"apiVersion: v1\nkind: Srvice":                          `a.yaml:1: "Srvice" of apiVersion "v1" is passed over; did you mean Service of apiVersion v1?`,
		"apiVersion: v1\nkind: Pod":                             "",
		"apiVersion: v1\nkind: ServiceAccount":                  "",
		"apiVersion: networking.k8s.io/v1\nkind: Ingress":       "",
		"apiVersion: serving.knative.dev/v1\nkind: Service":     "",
	} {
		c, findings := decode("a.yaml", []byte(text), Options{})
		switch {
		case len(c.passedOver) != 1 || len(c.objects) > 0:
			t.Errorf("%q: %v, %d objects", text, c.passedOver, len(c.objects))
		case want == "" && len(findings) == 0:
		case len(findings) != 1 || !findings[0].warning || findings[0].String() != want:
			t.Errorf("%q: %v, want %q", text, findings, want)
		}
	}
}

// The API server's limits on numbers of things.
func TestLimits(t *testing.T) {
	many := func(n int, item string) string { return strings.TrimSuffix(strings.Repeat(item+", ", n), ", ") }
	slice := "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: a, labels: {kubernetes.io/service-name: a}}\naddressType: IPv4\n"
	ports := func(n int) string {
		var b strings.Builder
		for i := range n {
			fmt.Fprintf(&b, "- {name: p%d, port: %d}\n", i, i+1)
		}
		return b.String()
	}
	for _, tt := range []struct{ text, want string }{
		{slice + "endpoints: [" + many(1000, "{addresses: [10.1.0.1]}") + "]", ""},
		{slice + "endpoints: [" + many(1001, "{addresses: [10.1.0.1]}") + "]", "a.yaml:5: EndpointSlice default/a: endpoints: has 1001 endpoints: 1000 is the limit, make several slices of it"},
		{slice + "endpoints: [{addresses: [" + many(101, "10.1.0.1") + "]}]", "a.yaml:5: EndpointSlice default/a: endpoints[0].addresses: has 101 addresses: 100 is the limit"},
		{slice + "ports:\n" + ports(100), ""},
		{slice + "ports:\n" + ports(101), "a.yaml:5: EndpointSlice default/a: ports: has 101 ports: 100 is the limit"},
		{strings.Replace(svc("a", "10.96.0.1"), "  - port: 80\n", "  "+strings.ReplaceAll(ports(101), "\n", "\n  "), 1), "a.yaml:7: Service default/a: spec.ports: has 101 ports: 100 is the limit"},
	} {
		_, findings := decode("a.yaml", []byte(tt.text), Options{})
		got := ""
		if len(findings) > 0 {
			got = findings[0].String()
		}
		check.Textf(t, got, tt.want, "decoded")
	}
}

// The line of a syntax error is right however long the file is before and
// behind it.
func TestLineOfSyntaxErrorInLongFile(t *testing.T) {
	var b strings.Builder
	b.WriteString("apiVersion: v1\nkind: List\nitems:\n")
	item := "- " + strings.TrimSuffix(strings.ReplaceAll(svc("a", "10.96.0.1"), "\n", "\n  "), "  ")
	for i := range 4000 {
		if i == 2500 {
			b.WriteString("- kind: Service\n   apiVersion: v1\n")
		}
		b.WriteString(item)
	}
	_, findings := decode("a.yaml", []byte(b.String()), Options{})
	want := fmt.Sprintf("a.yaml:%d: not valid YAML: mapping values are not allowed in this context (text with \": \" in it needs quotes; or the line is indented wrongly)", 3+2500*8+2)
	if len(findings) != 1 || findings[0].String() != want {
		t.Errorf("%v, want %s", findings, want)
	}
}

// Not all of a thousand errors are told.
func TestManyErrors(t *testing.T) {
	var b strings.Builder
	for i := range 1000 {
		b.WriteString("---\n" + strings.Replace(svc(fmt.Sprintf("a%d", i), "10.96.0.1"), "port: 80", "port: 0\n    new: 1", 1))
	}
	_, findings := decode("a.yaml", []byte(b.String()), Options{})
	if len(findings) != 12 || findings[11].String() != "a.yaml: 990 more errors" || !strings.Contains(fmt.Sprint(findings), "(and 999 more like it)") {
		t.Errorf("%d: %v", len(findings), findings)
	}
}

// Aliases that stand for billions of values are refused in no time.
func TestAliasBomb(t *testing.T) {
	var b strings.Builder
	b.WriteString("apiVersion: v1\nkind: Service\nmetadata:\n  name: a\n  labels: &a0 {x: y}\n  finalizers: [a]\nspec:\n  ports:\n")
	fmt.Fprintf(&b, "  - &p0 {port: 80}\n")
	b.WriteString("x0: &x0 [a, a, a, a, a, a, a, a, a, a]\n")
	for i := range 12 {
		fmt.Fprintf(&b, "x%d: &x%d [%s*x%d]\n", i+1, i+1, strings.Repeat(fmt.Sprintf("*x%d, ", i), 9), i)
	}
	text := "apiVersion: v1\nkind: List\nitems: &i\n- *i\n- *i\n---\n" +
		"apiVersion: v1\nkind: Endpoints\nmetadata: {name: a}\nsubsets: &s\n- addresses: &a [" + strings.Repeat("{ip: 10.1.0.1}, ", 900) + "]\n" +
		strings.Repeat("- {addresses: *a}\n", 900) + "---\n" + b.String()
	from := cpuTime(t)
	_, findings := decode("a.yaml", []byte(text), Options{})
	if took := cpuTime(t) - from; took > 5*time.Second {
		t.Errorf("took %v", took)
	}
	check.Containsf(t, fmt.Sprint(findings), "aliases stand for too many values", "findings")
}

// The sample manifests that are in order give what is said here.
func TestSamples(t *testing.T) {
	for dir, want := range map[string]string{
		"hand": "map[EndpointSlice:2 Endpoints:1 Node:1 Service:3 ServiceCIDR:1] map[]",
		"dev":  "map[EndpointSlice:9 Node:3 Service:7] map[]",
	} {
		objects, passedOver := map[kind]int{}, map[string]int{}
		files, err := filepath.Glob(filepath.Join(samples, dir, "*"))
		if err != nil || len(files) == 0 {
			t.Fatal(err, files)
		}
		for _, f := range files {
			data := must.Read(t, f)
			c, findings := decode(filepath.Base(f), data, Options{})
			for _, f := range findings {
				t.Error(f)
			}
			for _, o := range c.objects {
				objects[o.key.kind]++
			}
			for k, n := range c.passedOver {
				passedOver[k] += n
			}
		}
		check.Equalf(t, fmt.Sprint(objects, passedOver), want, "%s", dir)
	}
}

// Filling objects from nodes gives what the usual way over JSON gives.
func TestFillAgreesWithJSON(t *testing.T) {
	for _, dir := range []string{"hand", "dev", "broken"} {
		files, _ := filepath.Glob(filepath.Join(samples, dir, "*.yaml"))
		for _, f := range files {
			data := must.Read(t, f)
			compareWithJSON(t, data)
		}
	}
}

// compareWithJSON compares each object of a file, as filled from nodes, with
// what encoding/json makes of it.
func compareWithJSON(t *testing.T, data []byte) {
	t.Helper()
	compare := func(n *yaml.Node) {
		k, ok := kinds[kind(scalar(n, "kind"))]
		if !ok {
			return
		}
		text, err := yaml.Marshal(n)
		if err != nil {
			return
		}
		got, want := k.make(), k.make()
		wrong := false
		f := filler{budget: 1 << 20, report: func(int, string, string, bool) { wrong = true }}
		f.object(n, got)
		if wrong {
			return // JSON is more lenient
		}
		asJSON, err := sigsyaml.YAMLToJSON(text)
		if err != nil {
			return
		}
		err = json.Unmarshal(asJSON, want)
		if err != nil && strings.Contains(err.Error(), "cannot unmarshal bool") {
			return // "y" is a truth value in YAML 1.1 and text here
		}
		if err != nil {
			t.Errorf("JSON refuses what is taken: %v\n%s", err, text)
			return
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s\n%s", text, cmp.Diff(want, got))
		}
	}
	_ = parseYAML(data, func(n *yaml.Node) {
		if items := field(n, "items"); items != nil && items.Kind == yaml.SequenceNode {
			for _, item := range items.Content {
				compare(item)
			}
			return
		}
		compare(n)
	})
}

// What is large and of no use to a proxy is not kept.
func TestLargeFieldsAreLeftOut(t *testing.T) {
	n := one[*corev1.Node](t, "a.yaml", "apiVersion: v1\nkind: Node\nmetadata: {name: a, managedFields: [{manager: kubelet}]}\nstatus: {images: [{names: [a], sizeBytes: 1}]}")
	if n.ManagedFields != nil || n.Status.Images != nil {
		t.Errorf("%v", n)
	}
}

// Each value of a wrong type is named with its line, also one that the decoder
// does not locate, behind an alias or in a merged mapping.
func TestValuesOfAWrongType(t *testing.T) {
	const text = `apiVersion: v1
kind: Node
metadata:
  name: a
  creationTimestamp: yesterday
  generation: 1.5
  labels: {a/b.c: yes, b: &b [1], c: *b}
  annotations:
    <<: {d: 0x10}
status:
  capacity: {cpu: lots}
  allocatable: {cpu: 1_000}
spec:
  unschedulable: "no"
  podCIDRs: 10.0.0.0/8
  taints: [{<<: [3], key: a}]
`
	const want = `a.yaml:5: Node a: metadata.creationTimestamp: "yesterday": parsing time "yesterday" as "2006-01-02T15:04:05Z07:00": cannot parse "yesterday…
a.yaml:6: Node a: metadata.generation: 1.5 is a number where a whole number of 64 bits is wanted
a.yaml:7: Node a: metadata.labels[a/b.c]: yes is a truth value where text is wanted: put it in quotes
a.yaml:7: Node a: metadata.labels.b: is a list where text is wanted
a.yaml:9: Node a: metadata.annotations.d: 0x10 is a number where text is wanted: put it in quotes
a.yaml:11: Node a: status.capacity.cpu: "lots": quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+…
a.yaml:14: Node a: spec.unschedulable: "no" is text where true or false is wanted
a.yaml:15: Node a: spec.podCIDRs: "10.0.0.0/8" is text where a list is wanted
a.yaml:16: Node a: spec.taints[0]: a number cannot be merged, only a mapping
`
	_, findings := decode("a.yaml", []byte(text), Options{})
	var got strings.Builder
	for _, f := range findings {
		got.WriteString(f.String() + "\n")
	}
	check.Equal(t, cmp.Diff(want, got.String()), "")
}

// The YAML parser knows neither "\/" nor surrogate pairs.
func TestJSONEscapes(t *testing.T) {
	s := one[*corev1.Service](t, "a.json", `{"apiVersion": "v1", "kind": "Service",
		"metadata": {"name": "a", "annotations": {"a": "\ud83d\ude80 \/"}},
		"spec": {"clusterIP": "10.96.0.1", "ports": [{"port": 80}]}}`)
	check.Equal(t, s.Annotations["a"], "🚀 /")
}

// Both parsers make the same nodes of JSON, lines included.
func TestJSONParserAgreesWithYAML(t *testing.T) {
	text := `{
	"a": [1, -2.5e3, true, null, "x\u00e9\n", {}],
	"b": {
		"c": [], "d": "2026-01-01"
	}
}`
	var a, b []string
	collect := func(out *[]string) func(*yaml.Node) {
		var visit func(n *yaml.Node)
		visit = func(n *yaml.Node) {
			*out = append(*out, fmt.Sprintf("%d %d %s %q", n.Line, n.Kind, n.ShortTag(), n.Value))
			for _, c := range n.Content {
				visit(c)
			}
		}
		return visit
	}
	must.OK(t, parseJSON([]byte(text), collect(&a)))
	must.OK(t, parseYAML([]byte(text), collect(&b)))
	check.Equal(t, cmp.Diff(b, a), "")
}

// FuzzDecode: whatever is in a file, reading it ends, names lines that exist,
// and returns objects that have names of their own.
func FuzzDecode(f *testing.F) {
	for _, dir := range []string{"broken", "hand"} {
		files, _ := filepath.Glob(filepath.Join(samples, dir, "*"))
		for _, name := range files {
			data := must.Read(f, name)
			f.Add(data, filepath.Ext(name) == ".json")
		}
	}
	f.Fuzz(func(t *testing.T, data []byte, asJSON bool) {
		name := "a.yaml"
		if asJSON {
			name = "a.json"
		}
		c, findings := decode(name, data, Options{})
		lines := strings.Count(string(data), "\n") + strings.Count(string(data), "\r") + strings.Count(string(data), "\u0085") +
			strings.Count(string(data), "\u2028") + strings.Count(string(data), "\u2029") + 1
		for _, f := range findings {
			if f.file != name || f.line < 0 || f.line > lines || f.text == "" {
				t.Errorf("%q of %d lines", f, lines)
			}
		}
		if hasErrors(findings) {
			return
		}
		for _, o := range c.objects {
			if o.key.Name.Name == "" || o.value == nil || o.line < 1 {
				t.Errorf("object %+v", o)
			}
			if e, ok := o.value.(*endpoints); ok {
				slices, _ := mirror(e)
				for _, s := range slices {
					if len(s.Endpoints) == 0 {
						t.Errorf("an empty slice of %s", o.key)
					}
				}
			}
		}
		if !asJSON && len(data) < 4096 {
			compareWithJSON(t, data)
		}
		compareWithKept(t, name, c)
	})
}

// compareWithKept: the next process gets objects as they are.
func compareWithKept(t *testing.T, name string, c content) {
	t.Helper()
	w := New(t.TempDir(), Options{})
	w.files[name] = &fileState{good: c}
	must.OK(t, w.Keep(w.dir, []string{name}, func(k *Kept) error {
		got, err := k.content(w.options)
		must.OK(t, err)
		check.Equal(t, len(got.objects), len(c.objects))
		for i, o := range got.objects {
			want := c.objects[i]
			if o.line != want.line || o.key != want.key || !equality.Semantic.DeepEqual(o.value, want.value) {
				t.Errorf("%s, line %d, was %s, line %d:\n%s", o.key, o.line, want.key, want.line, cmp.Diff(want.value, o.value))
			}
		}
		return nil
	}))
}
