package peer

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/world"
)

// metricsPort is the port of sluice's metrics on the node.
const metricsPort = 10249

// sluice is a build of the product with some flags.
func sluice(build, name, about string, flags ...string) Peer {
	// exec would search PATH for a name without a slash.
	if !strings.Contains(build, "/") {
		build = "./" + build
	}
	return Peer{
		Name: name, About: about, program: build, version: []string{"version"},
		start: func(s *Site) (*Running, error) { return startSluice(s, build, flags) },
	}
}

func startSluice(s *Site, build string, flags []string) (*Running, error) {
	// In a directory of their own: their parent is watched too, and the access log is no
	// file there.
	dir := filepath.Join(s.Dir, "config", "manifests")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(filepath.Join(dir, "bench.yaml"), []byte(Manifests(s.World)), 0o644); err != nil {
		return nil, err
	}
	metrics := netip.AddrPortFrom(s.World.Loopback(), metricsPort).String()
	args := []string{
		"run", "--manifests", dir,
		"--hostname-override", "node",
		"--service-cidr", s.World.ServiceCIDR.String(),
		"--access-log", filepath.Join(s.Dir, "access.log"),
		"--metrics-bind-address", metrics,
	}
	if help, err := exec.Command(build, "run", "--help").Output(); err != nil {
		return nil, fmt.Errorf("%s run --help: %w", build, err)
	} else if strings.Contains(string(help), "--bpf-root") { // older builds have no such flag
		args = append(args, "--bpf-root", s.World.BPFRoot, "--datapath=relay") // unless flags say otherwise
	}
	r, err := s.launch(world.Command{Path: build, Args: slices.Concat(args, flags, s.Flags)})
	if err != nil {
		return nil, err
	}
	r.Metrics = metrics
	return r, nil
}

// Manifests returns the objects that describe the world's service.
func Manifests(w *world.World) string {
	family := "IPv4"
	if w.IPv6 {
		family = "IPv6"
	}
	var ports, slicePorts, endpoints strings.Builder
	for _, port := range load.Ports {
		fmt.Fprintf(&ports, "  - {name: p%d, protocol: TCP, port: %d, targetPort: %d}\n", port, port, port)
		fmt.Fprintf(&slicePorts, "- {name: p%d, protocol: TCP, port: %d}\n", port, port)
	}
	if w.SCTP {
		for _, port := range load.SCTPPorts {
			fmt.Fprintf(&ports, "  - {name: s%d, protocol: SCTP, port: %d, targetPort: %d}\n", port, port, port)
			fmt.Fprintf(&slicePorts, "- {name: s%d, protocol: SCTP, port: %d}\n", port, port)
		}
	}
	for _, port := range load.UDPPorts {
		fmt.Fprintf(&ports, "  - {name: u%d, protocol: UDP, port: %d, targetPort: %d}\n", port, port, port)
		fmt.Fprintf(&slicePorts, "- {name: u%d, protocol: UDP, port: %d}\n", port, port)
	}
	for i, e := range w.Endpoints {
		fmt.Fprintf(&endpoints, "- addresses: [\"%s\"]\n  conditions: {ready: true}\n  nodeName: server\n  targetRef: {kind: Pod, namespace: bench, name: server-%d}\n", e, i)
	}
	return fmt.Sprintf(`apiVersion: v1
kind: Node
metadata: {name: node}
status:
  addresses:
  - {type: InternalIP, address: "%[1]s"}
---
apiVersion: v1
kind: Service
metadata: {name: server, namespace: bench}
spec:
  clusterIP: "%[2]s"
  clusterIPs: ["%[2]s"]
  ipFamilies: [%[3]s]
  ports:
%[4]s---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: server-1
  namespace: bench
  labels: {kubernetes.io/service-name: server}
addressType: %[3]s
ports:
%[5]sendpoints:
%[6]s`, w.NodeAddr, w.VIP, family, ports.String(), slicePorts.String(), endpoints.String())
}
