package kubernetes

import (
	"reflect"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// full returns one object of each kind with every field filled that a proxy may
// read, and some that it does not.
func full() service.Change {
	meta := func(namespace, name string) metav1.ObjectMeta {
		return metav1.ObjectMeta{
			Namespace: namespace, Name: name, UID: "u", ResourceVersion: "7", Generation: 3, CreationTimestamp: metav1.Unix(1000, 0),
			Labels:        map[string]string{"app": "x"},
			Annotations:   map[string]string{"sluice.dev/balancer": "random", "sluice.dev/topology-keys": "kubernetes.io/hostname,*", "other/annotation": "y"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "kubectl"}},
		}
	}
	svc := &corev1.Service{ObjectMeta: meta("default", "web"), Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeLoadBalancer, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", "fd00::1"},
		IPFamilies:  []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
		Ports:       []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080, AppProtocol: ptr.To("http")}},
		Selector:    map[string]string{"app": "x"},
		ExternalIPs: []string{"192.0.2.1"}, LoadBalancerSourceRanges: []string{"198.51.100.0/24"},
		SessionAffinity:       corev1.ServiceAffinityClientIP,
		SessionAffinityConfig: &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To[int32](60)}},
		ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyCluster,
		InternalTrafficPolicy: ptr.To(corev1.ServiceInternalTrafficPolicyLocal), HealthCheckNodePort: 32000,
	}}
	svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{
		{IP: "192.0.2.2", IPMode: ptr.To(corev1.LoadBalancerIPModeVIP)}, {IP: "192.0.2.3", IPMode: ptr.To(corev1.LoadBalancerIPModeProxy)},
	}
	local := svc.DeepCopy()
	local.Name, local.Spec.ClusterIPs, local.Spec.ClusterIP = "local", []string{"10.96.0.2"}, "10.96.0.2"
	local.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	es := &discoveryv1.EndpointSlice{ObjectMeta: meta("default", "web-1"), AddressType: discoveryv1.AddressTypeIPv4,
		Ports: []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080), Protocol: ptr.To(corev1.ProtocolTCP)}},
		Endpoints: []discoveryv1.Endpoint{{
			Addresses:  []string{"10.1.0.1"},
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(true), Terminating: ptr.To(true)},
			Hostname:   ptr.To("h"), NodeName: ptr.To("a"), Zone: ptr.To("z"),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: "web-0", UID: "p", ResourceVersion: "1"},
			Hints:     &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "z"}}, ForNodes: []discoveryv1.ForNode{{Name: "a"}}},
		}},
	}
	es.Labels[discoveryv1.LabelServiceName] = "web"
	n := &corev1.Node{ObjectMeta: meta("", "a"), Spec: corev1.NodeSpec{PodCIDR: "10.1.0.0/24", PodCIDRs: []string{"10.1.0.0/24", "fd01::/64"},
		Taints: []corev1.Taint{{Key: "ToBeDeletedByClusterAutoscaler", Effect: corev1.TaintEffectNoSchedule}}}}
	n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.9"}, {Type: corev1.NodeHostName, Address: "a"}}
	n.Status.Images = []corev1.ContainerImage{{Names: []string{"image"}}}
	cidr := &networkingv1.ServiceCIDR{ObjectMeta: meta("", "k"), Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}}}
	return service.Change{
		Services: []*corev1.Service{svc, local}, EndpointSlices: []*discoveryv1.EndpointSlice{es},
		Nodes: []*corev1.Node{n}, ServiceCIDRs: []*networkingv1.ServiceCIDR{cidr},
	}
}

func TestTrimKeepsWhatTheModelReads(t *testing.T) {
	whole, trimmed := full(), full()
	source := &Source{options: Options{NodeName: "a"}}
	var slice any = trimmed.EndpointSlices[0]
	for range 2 { // twice is as good as once
		for _, svc := range trimmed.Services {
			trimService(svc)
		}
		parsed, _ := source.parseSlice(slice)
		slice, trimmed.EndpointSlices, trimmed.Slices = parsed, nil, []*service.Slice{parsed}
		trimNode(trimmed.Nodes[0])
		trimServiceCIDR(trimmed.ServiceCIDRs[0])
	}
	options := service.StoreOptions{NodeName: "a"}
	want, got := service.NewStore(options).Apply(whole), service.NewStore(options).Apply(trimmed)
	export := cmp.Exporter(func(reflect.Type) bool { return true })
	check.Textf(t, cmp.Diff(want.Ports, got.Ports, export), "", "service ports (-whole +trimmed)")
	check.Textf(t, cmp.Diff(want.Node, got.Node, export), "", "node (-whole +trimmed)")
	check.Textf(t, cmp.Diff(want.Problems, got.Problems), "", "problems (-whole +trimmed)")
	check.Textf(t, cmp.Diff(want.ServiceCIDRs, got.ServiceCIDRs, export), "", "ServiceCIDRs (-whole +trimmed)")
	found := 0
	for _, p := range want.Ports {
		found += len(p.Families[service.IPv4].Endpoints)
	}
	if len(want.Ports) != 2 || found != 1 {
		t.Fatal("the objects are not what the test takes them for")
	}
	if trimmed.Services[0].Spec.Selector != nil || trimmed.Services[0].ManagedFields != nil || trimmed.Nodes[0].Status.Images != nil {
		t.Error("what nobody reads was kept")
	}
}

// At the start, no API object of a slice stays in memory: a list of a million endpoints would
// take more than everything that is kept.
func TestSlicesAreParsedWhenTheyAreDecoded(t *testing.T) {
	client := must.Get(Connect(Connection{Master: "http://192.0.2.1"}))(t)
	for _, w := range New(client, Options{NodeName: "a"}).watchers {
		if w.kind != "endpointslices" {
			continue
		}
		got, err := w.into.Transformer()(full().EndpointSlices[0])
		if _, ok := got.(*service.Slice); !ok || err != nil {
			t.Errorf("a decoded slice is kept as a %T, %v", got, err)
		}
		return
	}
	t.Error("nothing watches EndpointSlices")
}
