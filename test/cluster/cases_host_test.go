//go:build cluster

package cluster

import (
	"fmt"
	"net"
	"net/netip"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// hostCases test other uses of a node, with which a proxy must not interfere.
var hostCases = []testCase{
	{"HostPorts beside node ports", func(w *world) {
		port := w.nodePort()
		// These are the rules of CNI's portmap plugin for a pod's hostPort.
		table := fmt.Sprintf("hostport%d", port)
		for _, rule := range []string{
			"add table ip " + table,
			fmt.Sprintf("add chain ip %s pre { type nat hook prerouting priority dstnat; }", table),
			fmt.Sprintf("add chain ip %s out { type nat hook output priority -100; }", table),
			fmt.Sprintf("add rule ip %s pre ip daddr %s tcp dport 54321 dnat to %s:8080", table, w.hosts.Node.IPv4, w.hosts.Pods[0].IPv4),
			fmt.Sprintf("add rule ip %s out ip daddr %s tcp dport 54321 dnat to %s:8080", table, w.hosts.Node.IPv4, w.hosts.Pods[0].IPv4),
			fmt.Sprintf("add rule ip %s pre ip daddr %s udp dport 54321 dnat to %s:8080", table, w.hosts.Node.IPv4, w.hosts.Pods[1].IPv4),
		} {
			must.Run(w.t, w.hosts.Node.Command(w.t, "nft", rule))
		}
		defer func() {
			if out, err := w.hosts.Node.Command(w.t, "nft", "delete table ip "+table).CombinedOutput(); err != nil {
				w.t.Errorf("the table of host ports: %v\n%s", err, out)
			}
		}()
		hostPort := at(w.hosts.Node.IPv4.String(), 54321)
		check := func() {
			w.t.Helper()
			w.expect(w.hosts.Outside, "tcp", hostPort, fmtPods(1))
			w.expect(w.hosts.Node, "tcp", hostPort, fmtPods(1))
			w.expect(w.hosts.Pods[1], "tcp", hostPort, fmtPods(1))
			w.expect(w.hosts.Outside, "udp", hostPort, fmtPods(2))
			w.expectAnswers("who is seen through the host port", "outside", func(patience time.Duration) string {
				_, seen := meet(patience, w.hosts.Outside, "tcp", hostPort)
				return w.owners[seen]
			})
		}
		check()
		svc := w.service("beside", func(s *corev1.Service) { // with the same number at the cluster IP
			s.Spec.Type, s.Spec.Ports[0].Port, s.Spec.Ports[0].NodePort = corev1.ServiceTypeNodePort, 54321, port
		})
		w.slice("beside", w.pod3())
		w.everybody("tcp", at(svc.Spec.ClusterIP, 54321), fmtPods(3))
		w.everybody("tcp", at(w.hosts.Node.IPv4.String(), svc.Spec.Ports[0].NodePort), fmtPods(3))
		check()
	}},
	{"the node's own servers", func(w *world) {
		l := must.Get(w.hosts.Node.Listen("tcp", ":54322"))(w.t)
		defer l.Close()
		go netns.Accept(l, func(c net.Conn) {
			_, _ = c.Write([]byte("host:54322\n"))
			_ = c.Close()
		})
		svc := w.service("same", func(s *corev1.Service) { s.Spec.Ports[0].Port = 54322 })
		w.slice("same", w.pod1(), w.pod3())
		w.everybody("tcp", at(w.hosts.Node.IPv4.String(), 54322), "host:54322")
		w.everybody("tcp", at(svc.Spec.ClusterIP, 54322), fmtPods(1, 3)) // F9
		w.everybody("tcp", at(svc.Spec.ClusterIP, 54323), "refused")
	}},
	{"node ports only on the node's primary address, if configured", func(w *world) {
		svc := w.tcpAndUDP("primary", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
		w.slice("primary", w.pod1())
		port := svc.Spec.Ports[0].NodePort
		for _, network := range []string{"tcp", "udp"} {
			w.everybody(network, at(w.hosts.Node.IPv4.String(), port), fmtPods(1))
			w.everybody(network, at(netns.OwnIPs[0].String(), port), "refused") // A4.4
			w.expect(w.hosts.Node, network, at("127.0.0.1", port), "refused")   // A4.5
			w.expect(w.hosts.Outside, network, at(svc.Spec.ClusterIP, port), "refused")
		}
	}},
	{"kube-proxy URLs", func(w *world) {
		for _, page := range []struct{ url, want string }{
			{"http://127.0.0.1:10256/healthz", `"lastUpdated"`},
			{"http://127.0.0.1:10256/livez", `"healthy":true`},
			{"http://127.0.0.1:10249/proxyMode", "tables"},
			{"http://127.0.0.1:10249/healthz", "ok"},
			{"http://127.0.0.1:10249/metrics", "kubeproxy_sync_proxy_rules_duration_seconds_bucket"},
			{"http://127.0.0.1:10249/configz", `{"kubeproxy.config.k8s.io":`},
			{"http://127.0.0.1:10249/metrics/slis", `kubernetes_healthcheck{name="ping",type="healthz"} 1`},
			{"http://127.0.0.1:10249/flagz", "\nkube-proxy flagz\nWarning: "},
			{"http://127.0.0.1:10249/flagz", "hostname-override"},
			{"http://127.0.0.1:10249/statusz", "\nkube-proxy statusz\nWarning: "},
			{"http://127.0.0.1:10249/statusz", "\nGo version"},
		} {
			w.until(page.url+" is as it should be", func() error { // some metrics follow with the next change
				body, err := w.get(page.url)
				if err == nil && (!strings.HasPrefix(body, "200 ") || !strings.Contains(body, page.want)) {
					err = fmt.Errorf("%.200q, want %q in it", body, page.want)
				}
				return err
			})
		}
	}},
	{"a segment outside of the window resets no connection", func(w *world) {
		svc := w.service("window", nil)
		w.slice("window", w.pod3())
		w.expect(w.hosts.Pods[0], "tcp", at(svc.Spec.ClusterIP, 80), fmtPods(3))
		server := w.hosts.Remote[0]
		raw := must.Get(server.ListenPacket("ip4:tcp", server.IPv4.String()))(w.t)
		defer raw.Close()
		c := must.Get(w.hosts.Pods[0].Dial("tcp", at(svc.Spec.ClusterIP, 80)))(w.t)
		defer c.Close()
		line := must.Get(greeting(patience, c, "tcp"))(w.t)
		_, address, _ := strings.Cut(line, " ")
		client, err := netip.ParseAddrPort(address)
		if err != nil {
			w.t.Fatalf("the server sees %q", line)
		}
		segment := must.Get(staleSegment(raw, netip.AddrPortFrom(server.IPv4, 8080), client))(w.t)
		for range 5 {
			must.OK(w.t, must.Err(raw.WriteTo(segment, &net.IPAddr{IP: client.Addr().AsSlice()})))
			must.OKf(w.t, echoes(c), "the connection after the stray segment")
		}
	}},
}
