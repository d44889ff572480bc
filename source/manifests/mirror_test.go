package manifests

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/test/check"
)

// dump returns slices as lines for people: name, family, ports, then endpoints.
func dump(slices []*discoveryv1.EndpointSlice) string {
	var b strings.Builder
	for _, s := range slices {
		fmt.Fprintf(&b, "%s/%s %s service=%s", s.Namespace, s.Name, s.AddressType, s.Labels["kubernetes.io/service-name"])
		for _, p := range s.Ports {
			fmt.Fprintf(&b, " %s:%d/%s", *p.Name, *p.Port, *p.Protocol)
		}
		b.WriteString("\n")
		for _, e := range s.Endpoints {
			fmt.Fprintf(&b, "  %s ready=%v", strings.Join(e.Addresses, ","), *e.Conditions.Ready)
			if e.NodeName != nil {
				b.WriteString(" node=" + *e.NodeName)
			}
			if e.Hostname != nil {
				b.WriteString(" hostname=" + *e.Hostname)
			}
			if e.TargetRef != nil {
				b.WriteString(" pod=" + e.TargetRef.Namespace + "/" + e.TargetRef.Name)
			}
			b.WriteString("\n")
		}
	}
	return b.String()
}

func TestMirror(t *testing.T) {
	tests := []struct {
		name, subsets, want string
	}{
		{"one subset", `
- addresses:
  - ip: 10.1.0.1
    nodeName: node-a
    targetRef: {kind: Pod, namespace: default, name: web-1}
  - ip: 10.1.0.2
    hostname: two
  ports: [{name: http, port: 8080}]`, `
default/web-mirror-ipv4-96c8efe6 IPv4 service=web http:8080/TCP
  10.1.0.1 ready=true node=node-a pod=default/web-1
  10.1.0.2 ready=true hostname=two
`},
		{"not ready", `
- addresses: [{ip: 10.1.0.1}]
  notReadyAddresses: [{ip: 10.1.0.2, nodeName: node-b}]
  ports: [{port: 80, protocol: UDP}]`, `
default/web-mirror-ipv4-246a0172 IPv4 service=web :80/UDP
  10.1.0.1 ready=true
  10.1.0.2 ready=false node=node-b
`},
		{"both families", `
- addresses: [{ip: 10.1.0.1}, {ip: "fd00:0::1"}]
  ports: [{port: 80}]`, `
default/web-mirror-ipv4-bb0a24f6 IPv4 service=web :80/TCP
  10.1.0.1 ready=true
default/web-mirror-ipv6-bb0a24f6 IPv6 service=web :80/TCP
  fd00::1 ready=true
`},
		{"subsets with the same ports are merged, in whatever order the ports are", `
- addresses: [{ip: 10.1.0.1}]
  ports: [{name: a, port: 80}, {name: b, port: 81}]
- addresses: [{ip: 10.1.0.2}, {ip: 10.1.0.1}]
  ports: [{name: b, port: 81}, {name: a, port: 80}]`, `
default/web-mirror-ipv4-711c0429 IPv4 service=web a:80/TCP b:81/TCP
  10.1.0.1 ready=true
  10.1.0.2 ready=true
`},
		{"subsets with other ports are not (A1.15)", `
- addresses: [{ip: 10.1.0.1}]
  ports: [{name: http, port: 80}]
- addresses: [{ip: 10.1.0.1}, {ip: 10.1.0.2}]
  ports: [{name: http, port: 8080}]`, `
default/web-mirror-ipv4-721dd1d6 IPv4 service=web http:80/TCP
  10.1.0.1 ready=true
default/web-mirror-ipv4-96c8efe6 IPv4 service=web http:8080/TCP
  10.1.0.1 ready=true
  10.1.0.2 ready=true
`},
		{"leading zeros are taken off (A1.7)", `
- addresses: [{ip: 010.001.000.007}]
  ports: [{port: 80}]`, `
default/web-mirror-ipv4-bb0a24f6 IPv4 service=web :80/TCP
  10.1.0.7 ready=true
`},
		{"no subsets", ` []`, "\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			slices, left := mirror(endpointsOf(t, "subsets:"+tt.subsets))
			if d := cmp.Diff(strings.TrimPrefix(tt.want, "\n"), dump(slices)); d != "" || left != 0 {
				t.Errorf("%d left out; (-want +got)\n%s", left, d)
			}
		})
	}
}

// endpointsOf reads the Endpoints default/web from all but their head.
func endpointsOf(t *testing.T, rest string) *endpoints {
	t.Helper()
	c, findings := decode("e.yaml", []byte("apiVersion: v1\nkind: Endpoints\n"+withName(rest)), Options{})
	if len(findings) > 0 || len(c.objects) != 1 {
		t.Fatal(findings)
	}
	return c.objects[0].value.(*endpoints)
}

func withName(rest string) string {
	if strings.HasPrefix(rest, "metadata") {
		return rest
	}
	return "metadata: {name: web}\n" + rest
}

func TestMirrorLabelsAndAnnotations(t *testing.T) {
	e := endpointsOf(t, `metadata:
  name: web
  creationTimestamp: "2026-01-02T03:04:05Z"
  labels: {app: web, kubernetes.io/service-name: wrong}
  annotations:
    note: kept
    endpoints.kubernetes.io/last-change-trigger-time: "2026-01-02T03:04:05Z"
    kubectl.kubernetes.io/last-applied-configuration: "{}"
subsets: [{addresses: [{ip: 10.1.0.1}], ports: [{port: 80}]}]
`)
	slices, _ := mirror(e)
	if len(slices) != 1 {
		t.Fatal(dump(slices))
	}
	wantLabels := map[string]string{
		"app":                                    "web",
		"kubernetes.io/service-name":             "web",
		"endpointslice.kubernetes.io/managed-by": "endpointslicemirroring-controller.k8s.io",
	}
	check.Equal(t, cmp.Diff(wantLabels, slices[0].Labels), "")
	check.Equal(t, cmp.Diff(map[string]string{"note": "kept"}, slices[0].Annotations), "")
	if !slices[0].CreationTimestamp.Equal(&e.CreationTimestamp) {
		t.Error(slices[0].CreationTimestamp)
	}
}

func TestMirrorLeavesOut(t *testing.T) {
	const subsets = "subsets: [{addresses: [{ip: 10.1.0.1}], ports: [{port: 80}]}]"
	for _, meta := range []string{
		`{name: web, labels: {endpointslice.kubernetes.io/skip-mirror: "true"}}`,
		`{name: web, annotations: {control-plane.alpha.kubernetes.io/leader: "{}"}}`,
		`{name: web, deletionTimestamp: "2026-01-02T03:04:05Z"}`,
	} {
		if slices, _ := mirror(endpointsOf(t, "metadata: "+meta+"\n"+subsets)); len(slices) > 0 {
			t.Errorf("%s is mirrored:\n%s", meta, dump(slices))
		}
	}
	if slices, _ := mirror(endpointsOf(t, `metadata: {name: web, labels: {endpointslice.kubernetes.io/skip-mirror: "no"}}`+"\n"+subsets)); len(slices) != 1 {
		t.Error("not mirrored")
	}
}

// 1,000 addresses of a subset are taken, as a slice may not have more.
func TestMirrorLimit(t *testing.T) {
	var b strings.Builder
	b.WriteString("subsets:\n- addresses:\n")
	for i := range 700 {
		fmt.Fprintf(&b, "  - ip: 10.1.%d.%d\n", i/250, i%250+1)
	}
	b.WriteString("  notReadyAddresses:\n")
	for i := range 700 {
		fmt.Fprintf(&b, "  - ip: 10.2.%d.%d\n", i/250, i%250+1)
	}
	b.WriteString("  ports: [{port: 80}]\n")
	slices, left := mirror(endpointsOf(t, b.String()))
	if len(slices) != 1 || len(slices[0].Endpoints) != 1000 || left != 400 {
		t.Errorf("%d slices, %d left out", len(slices), left)
	}
}
