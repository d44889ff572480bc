package flow

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Rule A3.15: at a port of this node that another program holds, that program answers. What is
// bound is forwarded, from the moment on at which it is bound.
func TestPortOfAnotherProgramIsLeftToIt(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	lab.Node.EchoTCP(t, 30080)
	n := newNode(t, lab, nil)
	n.relay.held = sys.EADDRINUSE
	d := service.Destination{Addr: lab.Node.IPv4, Port: 30080, Protocol: service.TCP}
	name := service.PortName{Name: service.Name{Namespace: "test", Name: "web"}, Port: "tcp", Protocol: service.TCP}
	nodePort := policy.Opening{Destination: d, Name: name, Kind: service.NodePort, Action: policy.Accept}
	path := n.server.paths[service.TCP]
	n.apply(svc(vip4, func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeNodePort
		s.Spec.Ports[0].NodePort = 30080
	}, at(lab.Backends[0].IPv4, 8080)))
	ask := func(want string) {
		t.Helper()
		for range 3 {
			if said, err := lab.Client.Ask("tcp", at(lab.Node.IPv4, 30080).String()); err != nil || !strings.HasPrefix(said, want) {
				t.Fatalf("%q, %v; want %s", said, err, want)
			}
		}
	}
	ask("node:30080") // nothing is bound yet
	if err := path.Bind(nodePort); err == nil {
		t.Fatal("bound")
	}
	ask("node:30080")
	n.relay.held = nil
	must.OK(t, path.Bind(nodePort))
	ask("b1:8080")
	n.relay.held = sys.EADDRINUSE // bound anew, for another Action
	_ = path.Bind(nodePort)
	ask("node:30080")
}
