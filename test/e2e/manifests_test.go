package e2e

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"

	"github.com/sluice-proxy/sluice/test/netns"
)

// webService is a Service with its EndpointSlices, as the tests write them.
type webService struct {
	name      string
	namespace string   // "" for default
	vips      []string // cluster IPs, IPv4 first
	port      uint16
	nodePort  uint16           // 0 for none
	protocol  string           // "" for TCP
	endpoints []netip.AddrPort // all of one family have one port
	// affinity is the timeout in seconds, 0 for none.
	affinity int
	// local sets the internal traffic policy Local.
	local bool
	// node is the endpoints' node; "" for a node other than the proxy's.
	node string
}

// destinations are the addresses of a dual-stack Service with a node port.
func (s webService) destinations(lab *netns.Lab) []string {
	return append(addresses(s.port, s.vips...), addresses(s.nodePort, lab.Node.IPv4.String(), lab.Node.IPv6.String())...)
}

// yaml writes the Service and a slice for each family.
func (s webService) yaml() string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: v1\nkind: Service\nmetadata:\n  name: %s\n  namespace: %s\nspec:\n", s.name, cmp.Or(s.namespace, "default"))
	kind, nodePort := "ClusterIP", ""
	if s.nodePort != 0 {
		kind, nodePort = "NodePort", fmt.Sprintf(", nodePort: %d", s.nodePort)
	}
	fmt.Fprintf(&b, "  type: %s\n  clusterIP: %q\n  clusterIPs: [%s]\n", kind, s.vips[0], quoted(s.vips))
	var families []string
	for _, vip := range s.vips {
		families = append(families, family(netip.MustParseAddr(vip)))
	}
	fmt.Fprintf(&b, "  ipFamilies: [%s]\n", strings.Join(families, ", "))
	if s.affinity > 0 {
		fmt.Fprintf(&b, "  sessionAffinity: ClientIP\n  sessionAffinityConfig: {clientIP: {timeoutSeconds: %d}}\n", s.affinity)
	}
	if s.local {
		b.WriteString("  internalTrafficPolicy: Local\n")
	}
	fmt.Fprintf(&b, "  ports:\n  - {name: http, port: %d%s, protocol: %s}\n", s.port, nodePort, cmp.Or(s.protocol, "TCP"))
	for _, f := range families {
		s.slice(&b, f)
	}
	return b.String()
}

func (s webService) slice(b *strings.Builder, f string) {
	var port uint16
	var list strings.Builder
	for i, e := range s.endpoints {
		if family(e.Addr()) != f {
			continue
		}
		port = e.Port()
		fmt.Fprintf(&list, "- addresses: [%q]\n  conditions: {ready: true}\n  nodeName: %s\n  zone: zone-a\n", e.Addr(), cmp.Or(s.node, "backend"))
		fmt.Fprintf(&list, "  targetRef: {kind: Pod, namespace: default, name: %s-%d}\n", s.name, i+1)
	}
	fmt.Fprintf(b, "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: %s-%s\n  namespace: %s\n",
		s.name, strings.ToLower(f), cmp.Or(s.namespace, "default"))
	fmt.Fprintf(b, "  labels: {kubernetes.io/service-name: %s}\naddressType: %s\n", s.name, f)
	if list.Len() == 0 {
		b.WriteString("ports: []\nendpoints: []\n")
		return
	}
	fmt.Fprintf(b, "ports: [{name: http, port: %d, protocol: %s}]\nendpoints:\n%s", port, cmp.Or(s.protocol, "TCP"), list.String())
}

func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

func quoted(texts []string) string {
	var q []string
	for _, t := range texts {
		q = append(q, fmt.Sprintf("%q", t))
	}
	return strings.Join(q, ", ")
}
