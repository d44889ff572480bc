// Package objects makes Services of the namespace test, and their endpoints.
package objects

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/service"
)

// namespace is that of all objects.
const namespace = "test"

// Service returns a Service with its Slices.
func Service(name, clusterIP string, ports []corev1.ServicePort, least int, endpoints ...netip.AddrPort) service.Change {
	return service.Change{
		Services: []*corev1.Service{{
			ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name, Annotations: map[string]string{}},
			Spec:       corev1.ServiceSpec{ClusterIP: clusterIP, Ports: ports},
		}},
		EndpointSlices: Slices(name, clusterIP, ports, least, endpoints...),
	}
}

// Slices returns an EndpointSlice for each endpoint of a Service, which serves all of its ports.
// Up to the least number, further ones are empty: they take an earlier change's endpoints away.
func Slices(name, clusterIP string, ports []corev1.ServicePort, least int, endpoints ...netip.AddrPort) (list []*discoveryv1.EndpointSlice) {
	family := discoveryv1.AddressTypeIPv4
	if netip.MustParseAddr(clusterIP).Is6() {
		family = discoveryv1.AddressTypeIPv6
	}
	for i := range max(least, len(endpoints)) {
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: namespace, Name: sliceName(name, i), Labels: map[string]string{discoveryv1.LabelServiceName: name}},
			AddressType: family,
		}
		if i < len(endpoints) {
			slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{endpoints[i].Addr().String()}}}
			for _, p := range ports {
				slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &p.Name, Port: new(int32(endpoints[i].Port())), Protocol: &p.Protocol})
			}
		}
		list = append(list, slice)
	}
	return list
}

// Gone deletes a Service and a number of its Slices.
func Gone(name string, slices int) service.Change {
	c := service.Change{Deleted: []service.ObjectKey{{Kind: service.KindService, Name: service.Name{Namespace: namespace, Name: name}}}}
	for i := range slices {
		c.Deleted = append(c.Deleted, service.ObjectKey{Kind: service.KindEndpointSlice, Name: service.Name{Namespace: namespace, Name: sliceName(name, i)}})
	}
	return c
}

func sliceName(name string, i int) string { return fmt.Sprintf("%s-%d", name, i) }
