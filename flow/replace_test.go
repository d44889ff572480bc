package flow

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// A port whose balancer or data path changes stays the kernel's, and keeps its sessions
// until their endpoint is gone (A8.2, A8.3).
func TestReplacedServiceKeepsItsDestinationsAndSessions(t *testing.T) {
	lab := netns.NewLab(t, 2)
	for _, b := range lab.Backends {
		b.WitnessTCP(t, 8080)
		b.WitnessUDP(t, 8080)
	}
	n := newNode(t, lab, nil)
	b1, b2 := at(lab.Backends[0].IPv4, 8080), at(lab.Backends[1].IPv4, 8080)
	n.apply(svc(vip4, nil, b1))
	c := must.Get(lab.Client.Dial("udp", vip4+":80"))(t)
	defer c.Close()
	for i, annotation := range []string{"", "balancer: random", "", "datapath: relay", "", "balancer: random"} {
		n.apply(svc(vip4, func(s *corev1.Service) {
			if name, value, ok := strings.Cut(annotation, ": "); ok {
				s.Annotations["sluice.dev/"+name] = value
			}
		}, b1))
		if said, err := question(c); err != nil || said != "b1:8080 "+c.LocalAddr().String() {
			t.Fatalf("change %d, %q: %q, %v", i, annotation, said, err)
		}
		if annotation == "datapath: relay" {
			continue // this node's relay serves nothing
		}
		if said, err := askBy(lab.Client, "tcp", vip4+":80"); err != nil || !strings.HasPrefix(said, "b1:8080") {
			t.Fatalf("change %d, %q: %q, %v", i, annotation, said, err)
		}
	}
	n.apply(svc(vip4, nil, b2))
	if said, err := question(c); err != nil || !strings.HasPrefix(said, "b2:8080") {
		t.Fatalf("%q, %v", said, err)
	}
	wait.For(t, "the first session's record", patience, func() error {
		for _, r := range n.taken() {
			if r.End == conntrack.EndpointGone && r.DatagramsFromClient == 6 {
				return nil
			}
		}
		return fmt.Errorf("%d records", len(n.taken()))
	})
}
