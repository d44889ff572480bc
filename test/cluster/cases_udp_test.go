//go:build cluster

package cluster

import (
	"fmt"
	"net"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// udpCases test UDP clients that keep their sockets.
var udpCases = []testCase{
	{"preserve UDP traffic when the server pod cycles: cluster IP, NodePort, load balancer, policy Local, clients of the node", func(w *world) {
		vip := w.vip()
		svc := w.tcpAndUDP("cycle", func(s *corev1.Service) {
			s.Spec.Type, s.Status.LoadBalancer.Ingress = corev1.ServiceTypeLoadBalancer, []corev1.LoadBalancerIngress{{IP: vip}}
		})
		local := w.tcpAndUDP("local", func(s *corev1.Service) {
			s.Spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
		})
		w.slice("cycle", w.pod1())
		w.slice("local", w.pod1())
		addresses := []string{at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[1].NodePort), at(vip, 80), at(local.Spec.ClusterIP, 80)}
		var sockets []*socket
		for _, from := range []*netns.Host{w.hosts.Outside, w.hosts.Pods[0], w.hosts.Node} {
			for _, address := range addresses {
				w.expect(from, "udp", address, fmtPods(1))
				sockets = append(sockets, w.socket(from, address))
			}
		}
		for _, s := range sockets {
			s.expect(fmtPods(1))
		}
		w.slice("cycle", w.pod2())
		w.slice("local", w.pod2())
		for _, s := range sockets {
			s.expect(fmtPods(2)) // A8.2
		}
	}},
	{"UDP clients whose server moves to another node", func(w *world) {
		svc := w.tcpAndUDP("away", nil)
		w.slice("away", w.pod1())
		w.expect(w.hosts.Outside, "udp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		s := w.socket(w.hosts.Outside, at(svc.Spec.ClusterIP, 80))
		s.expect(fmtPods(1))
		w.slice("away", w.pod3())
		s.expect(fmtPods(3))
	}},
	{"UDP clients that start before the first endpoint is ready", func(w *world) {
		svc := w.tcpAndUDP("early", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
		unready := w.pod1()
		unready.notReady, unready.notServing = true, true
		w.slice("early", unready)
		addresses := []string{at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[1].NodePort)}
		var sockets []*socket
		for _, from := range []*netns.Host{w.hosts.Outside, w.hosts.Pods[1], w.hosts.Node} {
			for _, address := range addresses {
				w.expect(from, "udp", address, "refused")
				s := w.socket(from, address)
				_ = s.ask() // there is no endpoint
				sockets = append(sockets, s)
			}
		}
		w.slice("early", w.pod1())
		for _, s := range sockets {
			s.expect(fmtPods(1)) // A8.6
		}
	}},
	{"UDP clients whose target port changes", func(w *world) {
		svc := w.tcpAndUDP("target", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
		w.slice("target", w.pod1())
		var sockets []*socket
		for _, address := range []string{at(svc.Spec.ClusterIP, 80), at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[1].NodePort)} {
			w.expect(w.hosts.Outside, "udp", address, fmtPods(1))
			sockets = append(sockets, w.socket(w.hosts.Outside, address))
		}
		for _, s := range sockets {
			s.expect(fmtPods(1))
		}
		moved := w.pod1()
		moved.port = 9090
		w.slice("target", moved)
		for _, s := range sockets {
			s.expect("pod-1:9090") // A8.5
		}
	}},
	{"UDP clients stay on an endpoint that terminates", func(w *world) {
		svc := w.tcpAndUDP("stays", nil)
		w.slice("stays", w.pod1())
		w.expect(w.hosts.Outside, "udp", at(svc.Spec.ClusterIP, 80), fmtPods(1))
		s := w.socket(w.hosts.Outside, at(svc.Spec.ClusterIP, 80))
		s.expect(fmtPods(1))
		w.slice("stays", withTerminating(w.pod1()), w.pod3())
		w.expect(w.hosts.Outside, "udp", at(svc.Spec.ClusterIP, 80), fmtPods(3))
		s.expect(fmtPods(1)) // A8.3
	}},
}

// socket is a UDP client that repeatedly asks who serves it.
type socket struct {
	w    *world
	name string
	conn net.Conn
}

func (w *world) socket(from *netns.Host, address string) *socket {
	w.t.Helper()
	c := must.Get(from.Dial("udp", address))(w.t)
	w.t.Cleanup(func() { _ = c.Close() })
	return &socket{w, from.Name() + " to " + address, c}
}

// ask returns the name of the current server, or the reason why there is none.
func (s *socket) ask() string {
	line, err := greeting(silence, s.conn, "udp")
	if err != nil {
		return err.Error()
	}
	name, _, _ := strings.Cut(line, " ")
	return name
}

// expect waits until that server serves the socket, and checks that this stays so.
func (s *socket) expect(want string) {
	s.w.t.Helper()
	if err := wait.Poll(inForce, func() error {
		for range 3 {
			if got := s.ask(); got != want {
				return fmt.Errorf("served by %q, want %q", got, want)
			}
		}
		return nil
	}); err != nil {
		s.w.t.Errorf("the socket of %s: %v", s.name, err)
	}
}
