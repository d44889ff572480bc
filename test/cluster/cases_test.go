//go:build cluster

package cluster

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/test/bpffs"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) {
	if os.Getenv(containedEnv) != "" {
		fmt.Fprintln(os.Stderr, enterContainer())
		os.Exit(1)
	}
	os.Exit(netns.Main(m))
}

// testCase is a behaviour on which clients of a cluster rely, named after the
// upstream test. Cases run in parallel: each has its own namespace in the API, and
// gets its addresses and ports from [world.clusterIP], [world.nodePort] and
// [world.vip].
type testCase struct {
	name string
	play func(*world)
}

var cases = slices.Concat(serviceCases, affinityCases, policyCases, podCases, sourceCases, loadBalancerCases, udpCases, hostCases)

func (w *world) wantStatus(url, status string) error {
	body, err := w.get(url)
	if err == nil && !strings.HasPrefix(body, status) {
		err = fmt.Errorf("%s", body)
	}
	return err
}

// setUp returns a cluster with its control plane, its nodes and servers in its
// pods.
func setUp(t *testing.T) *world {
	t.Helper()
	netns.Require(t)
	hosts := netns.NewCluster(t)
	w := &world{controlPlane: startControlPlane(t, hosts.Node), hosts: hosts}
	w.createNodes()
	for _, h := range append(hosts.Pods, hosts.Remote...) {
		for _, port := range []uint16{8080, 9090} {
			h.WitnessTCP(t, port)
			h.WitnessUDP(t, port)
		}
	}
	// Pods of the hosts' own network, and a remote host with a server on that port
	// too.
	for _, h := range []*netns.Host{hosts.Node, hosts.Node2} {
		address := at(h.IPv4.String(), hostPodPort)
		h.WitnessTCPAt(t, address)
		h.WitnessUDPAt(t, address)
	}
	hosts.World.WitnessTCP(t, 80)
	w.owners = make(map[netip.Addr]string)
	for _, h := range append(hosts.Hosts(), hosts.Node) {
		for _, a := range h.Addrs(t) {
			w.owners[a] = h.Name()
		}
	}
	return w
}

// createNodes creates the objects of both nodes.
func (w *world) createNodes() {
	w.t.Helper()
	hosts := w.hosts
	for i, name := range []string{"node", "node2"} {
		addresses := []netip.Addr{hosts.Node.IPv4, hosts.Node.IPv6}
		if i == 1 {
			addresses = []netip.Addr{hosts.Node2.IPv4, hosts.Node2.IPv6}
		}
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"topology.kubernetes.io/zone": "zone-" + string(rune('a'+i))}}}
		n.Spec.PodCIDRs = []string{netns.NodePods[0].String(), netns.NodePods[1].String()}
		if i == 1 {
			n.Spec.PodCIDRs = []string{netns.Node2Pods[0].String(), netns.Node2Pods[1].String()}
		}
		n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
		w.admin.create(n)
		for _, a := range addresses {
			n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
		}
		w.admin.update(n, "status")
	}
}

// proxies are the proxies with which the cases run.
var proxies = []struct {
	name  string
	start func(*world) *netns.Cmd
}{
	{"sluice", func(w *world) *netns.Cmd { return startSluice(w, "relay") }},
	{"sluice-kernel", func(w *world) *netns.Cmd { return startSluice(w, "kernel") }}, // the default
	{"kube-proxy", startKubeProxy},
}

// startSluice starts Sluice with a data path.
func startSluice(w *world, path string) *netns.Cmd {
	w.t.Helper()
	// The file is kind's, except for the kubeconfig's path and the ranges.
	w.write("proxy.conf", proxyConfig(w, "iptables"))
	args := []string{"run", "--config", filepath.Join(w.dir, "proxy.conf"), "--hostname-override", "node",
		"--access-log", w.accessLog(path), "--bpf-root", w.bpfRoot(), "-v", "4"}
	if path == "relay" {
		args = append(args, "--datapath", path)
	}
	cmd := w.start("sluice", os.Getenv("SLUICE_BIN"), args...)
	w.awaitProxy()
	return cmd
}

// accessLog is the file of Sluice's access log with a data path.
func (w *world) accessLog(path string) string { return filepath.Join(w.dir, path+".log") }

// bpfRoot is a BPF file system, or empty if this kernel has none.
func (w *world) bpfRoot() string {
	if w.pins == "" {
		root, closer, err := bpffs.Open()
		if err != nil {
			return ""
		}
		w.pins = root
		w.t.Cleanup(closer)
	}
	return w.pins
}

// wantPath expects clients behind the node's interfaces to have been served by a data
// path, over TCP and UDP. The kernel serves some of the node's own clients, too.
func (w *world) wantPath(path string) {
	w.t.Helper()
	log := must.Get(os.Open(w.accessLog(path)))(w.t)
	defer log.Close()
	own := w.hosts.NodeAddrs(w.t)
	right, wrong, early, between := make(map[string]int), 0, 0, 0
	for lines := bufio.NewScanner(log); lines.Scan(); {
		var r struct {
			Protocol, Path, Service string
			Client                  netip.AddrPort
			VIPKind                 string `json:"vip_kind"`
		}
		must.OK(w.t, json.Unmarshal(lines.Bytes(), &r))
		want := path
		if slices.Contains(own, r.Client.Addr()) || r.Client.Addr().IsLoopback() {
			if path == "kernel" {
				continue
			}
		} else if strings.Contains(r.Service, "/large:") && r.Protocol == "UDP" {
			continue // sessions that begin with a datagram that is too long for an upcall are relayed
		} else if r.Path == want {
			right[r.Protocol]++
		}
		if r.Path != want && want == "kernel" && r.VIPKind == "NodePort" {
			// The relay binds a new node port before the kernel forwards, and may have its
			// first connections.
			if early++; early <= 20 {
				continue
			}
		}
		if r.Path != want && want == "kernel" && r.VIPKind == "ClusterIP" {
			// The relay has a Service's first endpoints a moment before the kernel: a client that
			// comes just then is the relay's.
			if between++; between <= 3 {
				continue
			}
		}
		if r.Path != want {
			if wrong++; wrong <= 5 {
				w.t.Errorf("the data path of this connection is not %s: %s", want, lines.Text())
			}
		}
	}
	w.t.Logf("connections and sessions of clients behind the node, %s: %v; with another data path: %d", path, right, wrong)
	if right["TCP"] == 0 || right["UDP"] == 0 {
		w.t.Errorf("the test has seen too few connections: %v", right)
	}
}

func startKubeProxy(w *world) *netns.Cmd {
	w.t.Helper()
	w.write("proxy.conf", proxyConfig(w, "nftables"))
	cmd := w.start("kube-proxy", program(w.t, "kube-proxy"), "--config", filepath.Join(w.dir, "proxy.conf"), "--hostname-override", "node")
	w.awaitProxy()
	return cmd
}

// proxyConfig returns kube-proxy's configuration file.
func proxyConfig(w *world, mode string) string {
	return fmt.Sprintf(`apiVersion: kubeproxy.config.k8s.io/v1alpha1
kind: KubeProxyConfiguration
mode: %s
clientConnection: {kubeconfig: %q}
clusterCIDR: 10.244.0.0/16,fd00:244::/32
detectLocalMode: NodeCIDR
conntrack: {maxPerCore: 0}
nodePortAddresses: [primary]
nftables: {minSyncPeriod: 100ms}
`, mode, w.kubeconfig("system:kube-proxy"))
}

// awaitProxy waits until a proxy has applied a change; its /healthz does not tell
// that.
func (w *world) awaitProxy() {
	w.t.Helper()
	w.until("the proxy has put something in force", func() error {
		body, err := w.get("http://127.0.0.1:10249/metrics")
		if err == nil && !strings.Contains(body, "\nkubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} 1.") {
			err = fmt.Errorf("no sync yet")
		}
		if err == nil && strings.Contains(body, "are being loaded\"") {
			err = fmt.Errorf("kernel flows do not serve yet")
		}
		return err
	})
}

// TestCases runs each case with Sluice and with the real kube-proxy.
func TestCases(t *testing.T) {
	w := setUp(t)
	for _, p := range proxies {
		t.Run(p.name, func(t *testing.T) {
			w := w.with(t, p.name)
			w.proxy, w.forwarded = strings.CutSuffix(p.name, "-kernel")
			w.admin.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}})
			cmd := p.start(w)
			t.Run("at once", func(t *testing.T) {
				for i, c := range cases {
					t.Run(c.name, func(t *testing.T) {
						t.Parallel()
						begin := time.Now()
						w := w.with(t, fmt.Sprintf("%s-%d", p.name, i))
						w.admin.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}})
						defer w.admin.deleteServices(w.namespace)
						c.play(w)
						t.Logf("%s: %s", c.name, time.Since(begin).Round(time.Millisecond))
					})
				}
			})
			t.Run("work after the proxy has been started again", func(t *testing.T) {
				whole := w // the program that it starts outlives this test
				w := w.with(t, p.name)
				defer w.admin.deleteServices(w.namespace)
				svc := w.service("web", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
				w.slice("web", w.all()...)
				w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 2, 3))
				stop(cmd)
				w.slice("web", w.pod1(), w.pod3())
				cmd = p.start(whole)
				w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 3))
				w.expect(w.hosts.Outside, "tcp", at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort), fmtPods(1, 3))
			})
			stop(cmd)
			switch p.name {
			case "sluice":
				w.wantPath("relay")
			case "sluice-kernel":
				w.wantPath("kernel")
			}
		})
		if p.name == "kube-proxy" {
			if out, err := w.hosts.Node.Command(t, program(t, "kube-proxy"), "--cleanup").CombinedOutput(); err != nil {
				t.Logf("kube-proxy --cleanup: %v\n%s", err, out)
			}
		}
	}
}

// stop ends a program with SIGTERM.
func stop(cmd *netns.Cmd) {
	_ = cmd.Process.Signal(syscall.SIGTERM)
	_ = cmd.Wait()
}
