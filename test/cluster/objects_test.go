//go:build cluster

package cluster

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// world is the environment of a case: a cluster of hosts, its control plane, and a
// namespace in the API.
type world struct {
	*controlPlane
	hosts     *netns.Cluster
	namespace string
	proxy     string                // the current one: "sluice" or "kube-proxy"
	forwarded bool                  // with kernel flows
	owners    map[netip.Addr]string // hosts' names by address
	pins      string                // a BPF file system, once it is needed
	scaled    time.Duration         // how much longer many objects take
}

// with returns the same world for another test, with another namespace.
func (w *world) with(t *testing.T, namespace string) *world {
	plane, admin := *w.controlPlane, *w.admin
	plane.t, plane.admin, admin.t = t, &admin, t
	return &world{controlPlane: &plane, hosts: w.hosts, namespace: namespace, proxy: w.proxy, forwarded: w.forwarded, owners: w.owners, pins: w.pins}
}

// differs returns what is wanted of each proxy where they differ, as
// docs/compared-with-kube-proxy.md says.
func (w *world) differs(sluice, kubeProxy string) string {
	if w.proxy == "sluice" {
		return sluice
	}
	return kubeProxy
}

// relayed returns what is wanted where only the relay differs from kube-proxy.
func (w *world) relayed(relay, others string) string {
	if w.forwarded {
		return others
	}
	return w.differs(relay, others)
}

// given counts the addresses and ports that cases got.
var given struct{ clusterIPs, nodePorts, vips atomic.Int32 }

// clusterIP returns a cluster IP that no other Service of these tests has had. The
// API server allocates from the first 256 only when no others are free.
func (w *world) clusterIP() string { return fmt.Sprintf("10.96.0.%d", 20+given.clusterIPs.Add(1)) }

// nodePort returns a node port that no other Service has had. The API server
// allocates 30000 to 30085 only when no others are free.
func (w *world) nodePort() int32 { return 30000 + given.nodePorts.Add(1) }

// vip returns an address for a load balancer, which the host world has: packets
// that are not steered go there.
func (w *world) vip() string {
	w.t.Helper()
	ip := fmt.Sprintf("203.0.113.%d", 20+given.vips.Add(1))
	must.OK(w.t, w.hosts.World.AddAddr("lo", netip.PrefixFrom(netip.MustParseAddr(ip), 32)))
	return ip
}

var ctx = context.Background()

// endpoint is an endpoint of a slice; the zero conditions mean ready.
type endpoint struct {
	host                 *netns.Host
	node                 string
	notReady, notServing bool
	terminating          bool
	zones, nodes         []string // 0 means 8080; the same for all of a slice
	port                 int32    // 8080 if it is 0, and the same for all of a slice
}

// service creates a Service; edit changes it before.
func (w *world) service(name string, edit func(*corev1.Service)) *corev1.Service {
	w.t.Helper()
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
		Ports: []corev1.ServicePort{{Name: "p", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolTCP}},
	}}
	if edit != nil {
		edit(svc)
	}
	svc.Namespace = w.namespace
	ingress := svc.Status.LoadBalancer.Ingress
	w.admin.create(svc)
	if len(ingress) > 0 {
		svc.Status.LoadBalancer.Ingress = ingress
		w.admin.update(svc, "status")
	}
	return svc
}

// change edits an existing Service.
func (w *world) change(name string, edit func(*corev1.Service)) *corev1.Service {
	w.t.Helper()
	svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}}
	w.admin.read(svc)
	edit(svc)
	w.admin.update(svc)
	return svc
}

// slice creates or replaces the IPv4 (or IPv6) EndpointSlice of a Service, with
// the port named p.
func (w *world) slice(service string, endpoints ...endpoint) {
	port := int32(8080)
	for _, e := range endpoints {
		port = cmp.Or(e.port, port)
	}
	w.sliceOf(service, service+"-4", false, port, endpoints...)
}

func (w *world) sliceOf(service, name string, ipv6 bool, port int32, endpoints ...endpoint) {
	w.t.Helper()
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: w.namespace, Name: name, Labels: map[string]string{discoveryv1.LabelServiceName: service}},
		AddressType: discoveryv1.AddressTypeIPv4,
	}
	for _, protocol := range []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP} {
		suffix := ""
		if protocol == corev1.ProtocolUDP {
			suffix = "-udp"
		}
		s.Ports = append(s.Ports, discoveryv1.EndpointPort{Name: ptr.To("p" + suffix), Port: ptr.To(port), Protocol: ptr.To(protocol)})
	}
	if ipv6 {
		s.AddressType = discoveryv1.AddressTypeIPv6
	}
	for _, e := range endpoints {
		address := e.host.IPv4
		if ipv6 {
			address = e.host.IPv6
		}
		out := discoveryv1.Endpoint{
			Addresses: []string{address.String()}, NodeName: ptr.To(e.node),
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(!e.notReady && !e.terminating), Serving: ptr.To(!e.notServing), Terminating: ptr.To(e.terminating)},
		}
		if len(e.zones)+len(e.nodes) > 0 {
			out.Hints = &discoveryv1.EndpointHints{}
		}
		for _, z := range e.zones {
			out.Hints.ForZones = append(out.Hints.ForZones, discoveryv1.ForZone{Name: z})
		}
		for _, n := range e.nodes {
			out.Hints.ForNodes = append(out.Hints.ForNodes, discoveryv1.ForNode{Name: n})
		}
		s.Endpoints = append(s.Endpoints, out)
	}
	if w.admin.tryUpdate(s.DeepCopy()) != nil {
		w.admin.create(s)
	}
}

// dropSlice removes an EndpointSlice.
func (w *world) dropSlice(name string) {
	w.t.Helper()
	w.admin.delete(&discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: name}})
}

// The endpoints of the cluster: two on the node, one on the other node.
func (w *world) pod1() endpoint { return endpoint{host: w.hosts.Pods[0], node: "node"} }
func (w *world) pod2() endpoint { return endpoint{host: w.hosts.Pods[1], node: "node"} }
func (w *world) pod3() endpoint { return endpoint{host: w.hosts.Remote[0], node: "node2"} }

// hostPod1 and hostPod2 are pods in their nodes' own network.
func (w *world) hostPod1() endpoint {
	return endpoint{host: w.hosts.Node, node: "node", port: hostPodPort}
}
func (w *world) hostPod2() endpoint {
	return endpoint{host: w.hosts.Node2, node: "node2", port: hostPodPort}
}

// hostPodPort is the port of pods in a node's own network.
const hostPodPort = 7070

// all returns the endpoints with addresses of their own.
func (w *world) all() []endpoint { return []endpoint{w.pod1(), w.pod2(), w.pod3()} }
