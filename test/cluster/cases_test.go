//go:build cluster

package cluster

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// cases are what clients of a cluster rely on, named after the upstream tests
// that they stand for.
var cases = []struct {
	name string
	play func(*world)
}{
	{"serve a basic endpoint, change and lose endpoints", func(w *world) {
		svc := w.service("web", nil)
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), "refused")
		w.slice("web", w.all()...)
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 2, 3))
		w.slice("web", w.pod2())
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(2))
		w.slice("web")
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), "refused")
	}},
	{"endpoints made of Pods by the real controller", func(w *world) {
		svc := w.service("web", func(s *corev1.Service) { s.Spec.Selector = map[string]string{"app": "web"} })
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: w.namespace, Name: "pod-1", Labels: map[string]string{"app": "web"}},
			Spec: corev1.PodSpec{NodeName: "node", Containers: []corev1.Container{{Name: "c", Image: "i"}}}}
		w.admin.create(pod)
		ip := w.hosts.Pods[0].IPv4.String()
		pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}},
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}
		w.admin.update(pod, "status")
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		pod.Status.Conditions[0].Status = corev1.ConditionFalse
		w.admin.update(pod, "status")
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "refused")
	}},
	{"same port and different protocols", func(w *world) {
		svc := w.service("dns", func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
		})
		w.slice("dns", w.pod1(), w.pod3())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 3))
		w.everybody("udp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 3))
		w.slice("dns")
		w.expect(w.hosts.Outside, "udp", at(svc.Spec.ClusterIP, 80), "refused")
	}},
	{"NodePort, changes of type, listening on the same number for another protocol", func(w *world) {
		svc := w.service("np", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
		w.slice("np", w.all()...)
		port := svc.Spec.Ports[0].NodePort
		w.everybody("tcp", at(w.hosts.Node.IPv4.String(), port), fmtPods(1, 2, 3))
		w.change("np", func(s *corev1.Service) {
			s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: "p-udp", Port: 80, NodePort: port, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP})
		})
		w.expect(w.hosts.Outside, "udp", at(w.hosts.Node.IPv4.String(), port), fmtPods(1, 2, 3))
		w.change("np", func(s *corev1.Service) {
			s.Spec.Type = corev1.ServiceTypeClusterIP
			for i := range s.Spec.Ports {
				s.Spec.Ports[i].NodePort = 0
			}
		})
		w.expect(w.hosts.Outside, "tcp", at(w.hosts.Node.IPv4.String(), port), "refused")
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 2, 3))
		w.change("np", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalName, s.Spec.ClusterIP, s.Spec.ClusterIPs = corev1.ServiceTypeExternalName, "example.com", "", nil
		})
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "silent") // A3.12
	}},
	{"session affinity", func(w *world) {
		svc := w.service("sticky", func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP })
		w.slice("sticky", w.all()...)
		address := at(svc.Spec.ClusterIP, 80)
		w.until("one endpoint for all of 15 connections", func() error {
			if got := outcome(w.hosts.Outside, "tcp", address, 15); strings.Contains(got, " ") || !strings.HasPrefix(got, "pod-") {
				return fmt.Errorf("served by %q", got)
			}
			return nil
		})
		w.change("sticky", func(s *corev1.Service) { s.Spec.SessionAffinity = corev1.ServiceAffinityNone })
		w.expect(w.hosts.Outside, "tcp", address, fmtPods(1, 2, 3))
	}},
	{"internalTrafficPolicy Local", func(w *world) {
		svc := w.service("local", func(s *corev1.Service) {
			s.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
		})
		w.slice("local", w.pod1(), w.pod3())
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		w.slice("local", w.pod3())
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), "silent") // A3.5
	}},
	{"externalTrafficPolicy Local, its health check port", func(w *world) {
		svc := w.service("lb", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
		})
		w.slice("lb", w.pod1(), w.pod3())
		node := w.hosts.Node.IPv4.String()
		w.expect(w.hosts.Outside, "tcp", at(node, svc.Spec.Ports[0].NodePort), fmtPods(1))
		w.expect(w.hosts.Outside, "tcp", "203.0.113.10:80", fmtPods(1))
		w.expect(w.hosts.Pods[1], "tcp", "203.0.113.10:80", fmtPods(1, 3)) // A3.6
		health := fmt.Sprintf("http://%s:%d/", node, svc.Spec.HealthCheckNodePort)
		w.until("the health check port says 200", func() error { return w.wantStatus(health, "200") })
		w.slice("lb", w.pod3())
		w.expect(w.hosts.Outside, "tcp", at(node, svc.Spec.Ports[0].NodePort), "silent")
		w.expect(w.hosts.Pods[1], "tcp", "203.0.113.10:80", fmtPods(3))
		w.until("the health check port says 503", func() error { return w.wantStatus(health, "503") })
	}},
	{"only source ranges", func(w *world) {
		w.service("ranged", func(s *corev1.Service) {
			s.Spec.Type, s.Spec.LoadBalancerSourceRanges = corev1.ServiceTypeLoadBalancer, []string{"10.1.0.3/32"}
			s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "203.0.113.10"}}
		})
		w.slice("ranged", w.pod1())
		w.expect(w.hosts.Outside, "tcp", "203.0.113.10:80", "silent") // A3.10
		w.change("ranged", func(s *corev1.Service) { s.Spec.LoadBalancerSourceRanges = []string{"10.1.0.0/24"} })
		w.expect(w.hosts.Outside, "tcp", "203.0.113.10:80", fmtPods(1))
	}},
	{"connect by ExternalIP", func(w *world) {
		w.service("external", func(s *corev1.Service) { s.Spec.ExternalIPs = []string{"198.51.100.10"} })
		w.slice("external", w.pod2(), w.pod3())
		w.everybody("tcp", "198.51.100.10:80", fmtPods(2, 3))
	}},
	{"unready and terminating endpoints", func(w *world) {
		svc := w.service("end", nil)
		address := at(svc.Spec.ClusterIP, 80)
		unready, leaving := w.pod1(), w.pod2()
		unready.notReady, unready.notServing = true, true
		leaving.terminating = true
		w.slice("end", unready, leaving, w.pod3())
		w.everybody("tcp", address, fmtPods(3))
		w.slice("end", unready, leaving)
		w.everybody("tcp", address, fmtPods(2)) // A2.4
		leaving.notServing = true
		w.slice("end", unready, leaving)
		w.everybody("tcp", address, "refused") // A2.7
	}},
	{"named targetPorts that are different numbers on different endpoints", func(w *world) {
		svc := w.service("named", nil)
		w.slice("named", w.pod1())
		w.sliceOf("named", "named-other", false, 9090, w.pod2())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "pod-1:8080 pod-2:9090")
	}},
	{"topology hints", func(w *world) {
		svc := w.service("zoned", nil)
		near, far := w.pod1(), w.pod3()
		near.zones, far.zones = []string{"zone-a"}, []string{"zone-b"}
		w.slice("zoned", near, far)
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1)) // A2.9
		far.zones = nil
		w.slice("zoned", near, far)
		w.everybody("tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1, 3)) // A2.10
	}},
	{"dual stack", func(w *world) {
		svc := w.service("dual", func(s *corev1.Service) {
			s.Spec.IPFamilyPolicy, s.Spec.Type = ptr.To(corev1.IPFamilyPolicyRequireDualStack), corev1.ServiceTypeNodePort
		})
		w.slice("dual", w.pod1(), w.pod3())
		w.sliceOf("dual", "dual-6", true, 8080, w.pod2(), w.pod3())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIPs[0], 80), fmtPods(1, 3))
		w.everybody("tcp", at(svc.Spec.ClusterIPs[1], 80), fmtPods(2, 3))
		w.expect(w.hosts.Outside, "tcp", at(w.hosts.Node.IPv6.String(), svc.Spec.Ports[0].NodePort), fmtPods(2, 3))
	}},
	{"up and down, recreated, ports added and removed", func(w *world) {
		svc := w.service("again", nil)
		w.slice("again", w.pod1())
		ip := svc.Spec.ClusterIP
		w.expect(w.hosts.Outside, "tcp", at(ip, 80), fmtPods(1))
		w.admin.delete(svc)
		w.expect(w.hosts.Outside, "tcp", at(ip, 80), "silent")
		w.service("again", func(s *corev1.Service) { s.Spec.ClusterIP = ip })
		w.slice("again", w.pod2()) // the controller may have taken the old one away
		w.expect(w.hosts.Outside, "tcp", at(ip, 80), fmtPods(2))
		w.change("again", func(s *corev1.Service) { s.Spec.Ports[0].Port = 81 })
		w.expect(w.hosts.Outside, "tcp", at(ip, 81), fmtPods(2))
		w.expect(w.hosts.Outside, "tcp", at(ip, 80), "refused")
	}},
	{"service-proxy-name and headless", func(w *world) {
		svc := w.service("labelled", nil)
		w.slice("labelled", w.pod1())
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		w.change("labelled", func(s *corev1.Service) {
			s.Labels = map[string]string{"service.kubernetes.io/service-proxy-name": "somebody"}
		})
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), "silent")
		w.change("labelled", func(s *corev1.Service) { s.Labels = nil })
		w.expect(w.hosts.Outside, "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
	}},
	{"hairpin: a pod reaches itself", func(w *world) {
		svc := w.service("self", nil)
		w.slice("self", w.pod1())
		w.expect(w.hosts.Pods[0], "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
	}},
	{"UDP clients whose server goes", func(w *world) {
		svc := w.service("udp", func(s *corev1.Service) {
			s.Spec.Ports = []corev1.ServicePort{{Name: "p-udp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP}}
		})
		w.slice("udp", w.pod1())
		w.expect(w.hosts.Outside, "udp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		c, err := w.hosts.Outside.Dial("udp", at(svc.Spec.ClusterIP, 80))
		if err != nil {
			w.t.Fatal(err)
		}
		defer c.Close()
		same := func() string {
			_ = c.SetDeadline(time.Now().Add(silence))
			_, _ = c.Write([]byte("who\n"))
			buffer := make([]byte, 100)
			n, _ := c.Read(buffer)
			name, _, _ := strings.Cut(string(buffer[:n]), "\n")
			return name
		}
		if got := same(); got != fmtPods(1) {
			w.t.Errorf("the socket is served by %q", got)
		}
		w.slice("udp", w.pod3())
		w.until("the same socket is served by the new pod (A8.2)", func() error {
			if got := same(); got != fmtPods(3) {
				return fmt.Errorf("served by %q", got)
			}
			return nil
		})
	}},
}

func (w *world) wantStatus(url, status string) error {
	body, err := w.get(url)
	if err == nil && !strings.HasPrefix(body, status) {
		err = fmt.Errorf("%s", body)
	}
	return err
}

// setUp gives a cluster with its control plane, its nodes and servers in its
// pods.
func setUp(t *testing.T) *world {
	t.Helper()
	netns.Require(t)
	hosts := netns.NewCluster(t)
	w := &world{controlPlane: startControlPlane(t, hosts.Node), hosts: hosts}
	w.createNodes()
	for _, h := range append(hosts.Pods, hosts.Remote...) {
		for _, port := range []uint16{8080, 9090} {
			h.EchoTCP(t, port)
			h.EchoUDP(t, port)
		}
	}
	return w
}

// createNodes makes the objects of both nodes.
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

// proxies are what the cases are played with.
var proxies = []struct {
	name  string
	start func(*world) *netns.Cmd
}{
	{"sluice", startSluice},
	{"kube-proxy", startKubeProxy},
}

func startSluice(w *world) *netns.Cmd {
	w.t.Helper()
	// The file is kind's but for the kubeconfig's place and the ranges.
	w.write("proxy.conf", proxyConfig(w, "iptables"))
	cmd := w.start("sluice", os.Getenv("SLUICE_BIN"), "run", "--config", filepath.Join(w.dir, "proxy.conf"), "--hostname-override", "node",
		"--access-log", "off", "-v", "4")
	w.awaitProxy()
	return cmd
}

func startKubeProxy(w *world) *netns.Cmd {
	w.t.Helper()
	w.write("proxy.conf", proxyConfig(w, "nftables"))
	cmd := w.start("kube-proxy", program(w.t, "kube-proxy"), "--config", filepath.Join(w.dir, "proxy.conf"), "--hostname-override", "node")
	w.awaitProxy()
	return cmd
}

// proxyConfig gives kube-proxy's configuration file.
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

// awaitProxy waits until a proxy has put something in force: its /healthz says
// nothing of that.
func (w *world) awaitProxy() {
	w.t.Helper()
	w.until("the proxy has put something in force", func() error {
		body, err := w.get("http://127.0.0.1:10249/metrics")
		if err == nil && !strings.Contains(body, "\nkubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family=\"IPv4\"} 1.") {
			err = fmt.Errorf("no sync yet")
		}
		return err
	})
}

// TestCases plays each case with Sluice and with the real kube-proxy.
func TestCases(t *testing.T) {
	w := setUp(t)
	for _, p := range proxies {
		t.Run(p.name, func(t *testing.T) {
			w.t, w.admin.t = t, t
			cmd := p.start(w)
			for i, c := range cases {
				t.Run(c.name, func(t *testing.T) {
					begin := time.Now()
					w.t, w.admin.t = t, t
					w.namespace = fmt.Sprintf("%s-%d", p.name, i)
					namespace := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}}
					w.admin.create(namespace)
					c.play(w)
					w.admin.deleteServices(w.namespace)
					t.Logf("%s: %s", c.name, time.Since(begin).Round(time.Millisecond))
				})
			}
			_ = cmd.Process.Signal(os.Interrupt)
			_ = cmd.Wait()
		})
		if p.name == "kube-proxy" {
			if out, err := w.hosts.Node.Command(t, program(t, "kube-proxy"), "--cleanup").CombinedOutput(); err != nil {
				t.Logf("kube-proxy --cleanup: %v\n%s", err, out)
			}
		}
	}
}
