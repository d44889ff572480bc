package node

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/service"
)

// TestWrongAnnotationsCountAsMissing: in a cluster, the API server takes any value. It is a problem
// of the Service, so that an event and a metric tell, and has no effect.
func TestWrongAnnotationsCountAsMissing(t *testing.T) {
	for name, value := range map[string]string{
		"access-log": "some", "balancer": "best", "balancer-hash": "cookie", "datapath": "fast", "dial-timeouts": "1h", "eject-after": "0",
		"sctp-streams": "0", "udp-responses": "one", "udp-timeout": "soon",
		"kube-router.io/service.scheduler": "best", "service.cilium.io/lb-algorithm": "best",
	} {
		svc := &corev1.Service{}
		svc.Namespace, svc.Name = "shop", "web"
		svc.Spec.ClusterIP, svc.Spec.Ports = "10.96.0.1", []corev1.ServicePort{{Port: 80}}
		key := name
		if !strings.Contains(name, "/") {
			key = "sluice.dev/" + name
		}
		svc.Annotations = map[string]string{key: value}
		snap := service.NewStore(service.StoreOptions{Annotation: checkAnnotation}).Apply(service.Change{Services: []*corev1.Service{svc}})
		if len(snap.Problems) != 1 || snap.Problems[0].Object != "Service shop/web" || !strings.HasPrefix(snap.Problems[0].Text, "annotation "+key+": ") || !strings.Contains(snap.Problems[0].Text, `"`+value+`"`) {
			t.Errorf("%s: %q: %v", name, value, snap.Problems)
		}
		if len(snap.Ports) != 1 || len(snap.Ports[0].Annotations) != 0 {
			t.Errorf("%s: %q has an effect on %v", name, value, snap.Ports)
		}
	}
}
