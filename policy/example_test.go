package policy_test

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// What happens to connections to a Service with a node port and policy Local, on a
// node that has one of its two endpoints.
func Example() {
	web := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeNodePort, ClusterIP: "10.96.0.10", ClusterIPs: []string{"10.96.0.10"},
			ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicyLocal,
			Ports:                 []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP, NodePort: 30080}},
		},
	}
	endpoints := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To(""), Port: ptr.To(int32(8080)), Protocol: ptr.To(corev1.ProtocolTCP)}},
		Endpoints: []discoveryv1.Endpoint{
			{Addresses: []string{"10.244.0.5"}, NodeName: ptr.To("here")},
			{Addresses: []string{"10.244.1.5"}, NodeName: ptr.To("there")},
		},
	}
	store := service.NewStore(service.StoreOptions{NodeName: "here"})
	snapshot := store.Apply(service.Change{Services: []*corev1.Service{web}, EndpointSlices: []*discoveryv1.EndpointSlice{endpoints}})
	table := policy.Compile(nil, snapshot, policy.Config{
		NodeName:     "here",
		ClusterCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")},
		NodeIPs:      []netip.Addr{netip.MustParseAddr("172.16.0.1")},
	})

	for _, c := range []struct{ client, from, to string }{
		{"a pod", "10.244.0.9", "10.96.0.10:80"},
		{"another host", "198.51.100.7", "172.16.0.1:30080"},
		{"another host", "198.51.100.7", "10.96.0.10:81"},
	} {
		v := table.Resolve(service.TCP, netip.MustParseAddr(c.from), netip.MustParseAddrPort(c.to))
		fmt.Printf("%s to %s: %s by rule %s", c.client, c.to, v.Action, v.Rule)
		for _, e := range v.Candidates {
			fmt.Print(", ", e.Addr)
		}
		if v.Action == policy.Accept {
			fmt.Printf("; the endpoint sees the %s's address", v.Source)
		}
		fmt.Println()
	}
	// Output:
	// a pod to 10.96.0.10:80: accept by rule A3.2, 10.244.0.5:8080, 10.244.1.5:8080; the endpoint sees the client's address
	// another host to 172.16.0.1:30080: accept by rule A3.3, 10.244.0.5:8080; the endpoint sees the client's address
	// another host to 10.96.0.10:81: refuse by rule A3.12
}
