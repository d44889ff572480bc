package peer

import (
	"fmt"
	"net"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"sigs.k8s.io/yaml"

	"github.com/sluice-proxy/sluice/test/bench/scale"
	"github.com/sluice-proxy/sluice/test/bench/world"
)

// besides is the cluster in which kube-proxy has the world's Service: the number of rules is
// what its iptables mode costs.
var besides = scale.Size{Services: 1000, Each: 10}

// kubeProxy is a kube-proxy in one of its modes. It follows a simulated API server.
func kubeProxy(program, mode string) Peer {
	return Peer{
		Name: "kube-proxy-" + mode, program: program, version: []string{"--version"}, Columns: []string{"bulk1", "rr1", "rr64", "crc", "udp-rr64"},
		About: fmt.Sprintf("kube-proxy's %s mode, with %d other Services", mode, besides.Services),
		start: func(s *Site) (*Running, error) { return startKubeProxy(s, program, mode) },
	}
}

func startKubeProxy(s *Site, program, mode string) (*Running, error) {
	node, service, slice, err := objects(s.World)
	if err != nil {
		return nil, err
	}
	var l net.Listener
	err = s.World.Node.Do(func() error {
		if l, err = net.Listen("tcp4", "127.0.0.1:0"); err != nil {
			return err
		}
		return scale.Serve(l, besides, service, slice, node)
	})
	if err != nil {
		return nil, err
	}
	// The client counts as a pod, whose address is kept.
	r, err := s.launch(world.Command{Path: program, Args: []string{
		"--master", "http://" + l.Addr().String(), "--hostname-override", "node", "--proxy-mode", mode,
		"--cluster-cidr", s.World.Clients[0].String() + "/8", "--conntrack-max-per-core", "0",
	}})
	if err != nil {
		_ = l.Close()
		return nil, err
	}
	r.api = l
	return r, nil
}

// objects are those of the world's Manifests.
func objects(w *world.World) (node corev1.Node, service corev1.Service, slice discoveryv1.EndpointSlice, err error) {
	for i, text := range strings.Split(Manifests(w), "---\n") {
		if err = yaml.UnmarshalStrict([]byte(text), []any{&node, &service, &slice}[i]); err != nil {
			return node, service, slice, fmt.Errorf("manifest %d: %w", i, err)
		}
	}
	return node, service, slice, nil
}
