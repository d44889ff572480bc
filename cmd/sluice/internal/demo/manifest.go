package demo

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
)

// shopService is a Service of the demo as its manifest says it. All are in the
// namespace "shop" and have the one port http, 80.
type shopService struct {
	name     string
	purpose  string // the comment that heads its manifest
	number   int    // the last digits of its cluster IPs
	affinity bool
	pods     []string // names of backends
}

const (
	manifestNamespace = "shop"
	servicePort       = 80
)

// vips gives the cluster IPs.
func (s *shopService) vips() (v4, v6 netip.AddrPort) {
	cidr4, cidr6 := netip.MustParsePrefix(serviceCIDR4), netip.MustParsePrefix(serviceCIDR6)
	return netip.AddrPortFrom(host(cidr4, s.number), servicePort), netip.AddrPortFrom(host(cidr6, s.number), servicePort)
}

// String gives the name as records give it, without the port.
func (s *shopService) String() string { return manifestNamespace + "/" + s.name }

// file gives the name of the service's manifest.
func (s *shopService) file() string { return s.name + ".yaml" }

// yaml writes the Service and an EndpointSlice for each family the way a
// person would.
func (s *shopService) yaml(ipv6 bool) string {
	v4, v6 := s.vips()
	view := serviceView{Namespace: manifestNamespace, Name: s.name, Purpose: s.purpose, Affinity: s.affinity,
		Port: servicePort, TargetPort: backendPort, ClusterIPs: []netip.Addr{v4.Addr()}}
	families := []string{"IPv4"}
	if ipv6 {
		view.ClusterIPs = append(view.ClusterIPs, v6.Addr())
		families = append(families, "IPv6")
	}
	for _, f := range families {
		slice := sliceView{Family: f, Suffix: strings.ToLower(f)}
		for i, name := range backendNames {
			if !slices.Contains(s.pods, name) {
				continue
			}
			a4, a6 := backendAddrs(i)
			pod := podView{Name: name, Addr: a4}
			if f == "IPv6" {
				pod.Addr = a6
			}
			slice.Pods = append(slice.Pods, pod)
		}
		view.Slices = append(view.Slices, slice)
	}
	return render(serviceTemplate, view)
}

type serviceView struct {
	Namespace, Name, Purpose string
	Affinity                 bool
	Port, TargetPort         int
	ClusterIPs               []netip.Addr
	Slices                   []sliceView
}

type sliceView struct {
	Family, Suffix string
	Pods           []podView
}

type podView struct {
	Name string
	Addr netip.Addr
}

var serviceTemplate = template.Must(template.New("service").Parse(`# {{.Purpose}}
apiVersion: v1
kind: Service
metadata:
  name: {{.Name}}
  namespace: {{.Namespace}}
spec:
  clusterIP: {{index .ClusterIPs 0}}
  clusterIPs:
{{- range .ClusterIPs}}
  - {{.}}
{{- end}}
{{- if .Affinity}}
  sessionAffinity: ClientIP
{{- end}}
  ports:
  - name: http
    port: {{.Port}}
    targetPort: {{.TargetPort}}
{{- $service := .}}
{{- range .Slices}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {{$service.Name}}-{{.Suffix}}
  namespace: {{$service.Namespace}}
  labels:
    kubernetes.io/service-name: {{$service.Name}}
addressType: {{.Family}}
ports:
- name: http
  port: {{$service.TargetPort}}
{{- if not .Pods}}
endpoints: [] # none yet
{{- else}}
endpoints:
{{- range .Pods}}
- addresses: ["{{.Addr}}"]
  nodeName: node-b
  zone: zone-b
  targetRef: {kind: Pod, namespace: {{$service.Namespace}}, name: {{.Name}}}
{{- end}}
{{- end}}
{{- end}}
`))

// nodesYAML writes the two nodes.
func nodesYAML(ipv6 bool) string {
	nodes := []nodeView{
		{Name: "node-a", Zone: "zone-a", InternalIPs: []netip.Addr{nodeA4}, PodCIDRs: []netip.Prefix{podsA4}},
		{Name: "node-b", Zone: "zone-b", InternalIPs: []netip.Addr{nodeB4}, PodCIDRs: []netip.Prefix{podsB4}},
	}
	if ipv6 {
		for i, more := range []nodeView{
			{InternalIPs: []netip.Addr{nodeA6}, PodCIDRs: []netip.Prefix{podsA6}},
			{InternalIPs: []netip.Addr{nodeB6}, PodCIDRs: []netip.Prefix{podsB6}},
		} {
			nodes[i].InternalIPs = append(nodes[i].InternalIPs, more.InternalIPs...)
			nodes[i].PodCIDRs = append(nodes[i].PodCIDRs, more.PodCIDRs...)
		}
	}
	return render(nodesTemplate, nodes)
}

type nodeView struct {
	Name, Zone  string
	InternalIPs []netip.Addr
	PodCIDRs    []netip.Prefix
}

var nodesTemplate = template.Must(template.New("nodes").Parse(`# The proxy runs on node-a, where the clients are; the pods that serve are on node-b.
{{- range $i, $node := .}}
{{- if $i}}
---
{{- end}}
apiVersion: v1
kind: Node
metadata:
  name: {{.Name}}
  labels:
    topology.kubernetes.io/zone: {{.Zone}}
spec:
  podCIDR: {{index .PodCIDRs 0}}
  podCIDRs:
{{- range .PodCIDRs}}
  - {{.}}
{{- end}}
status:
  addresses:
{{- range .InternalIPs}}
  - type: InternalIP
    address: {{.}}
{{- end}}
{{- end}}
`))

// render fills a template in. The templates are constants and the views fit
// them, which a test proves; an error would show in the text.
func render(t *template.Template, view any) string {
	var b strings.Builder
	if err := t.Execute(&b, view); err != nil {
		fmt.Fprintf(&b, "\n# %v\n", err)
	}
	return b.String()
}

// shelf is the directory that the manifests are in.
type shelf struct {
	dir  string
	ipv6 bool
}

// fill makes the directory and writes everything.
func (s *shelf) fill(services []*shopService) error {
	if err := os.Mkdir(s.dir, 0o700); err != nil {
		return fmt.Errorf("manifests: %w", err)
	}
	if err := s.write("nodes.yaml", nodesYAML(s.ipv6)); err != nil {
		return err
	}
	for _, svc := range services {
		if err := s.put(svc); err != nil {
			return err
		}
	}
	return nil
}

// put writes a service's manifest the way an editor does: a new file, renamed
// into place.
func (s *shelf) put(svc *shopService) error { return s.write(svc.file(), svc.yaml(s.ipv6)) }

func (s *shelf) write(name, text string) error {
	draft := filepath.Join(s.dir, "."+name+".draft")
	if err := os.WriteFile(draft, []byte(text), 0o600); err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	if err := os.Rename(draft, filepath.Join(s.dir, name)); err != nil {
		return fmt.Errorf("manifest: %w", err)
	}
	return nil
}
