package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// loop is a Service over TCP and UDP of both families, and its endpoint.
type loop struct {
	name     string
	number   int // of its cluster IPs
	port     uint16
	nodePort uint16       // 0 for none
	external []netip.Addr // external IPs
	endpoint []netip.Addr // of each family
	target   uint16
	node     string // of the endpoint; "" for none
}

func (l *loop) vips() []string {
	return []string{fmt.Sprintf("10.96.0.%d", l.number), fmt.Sprintf("fd00:96::%d", l.number)}
}

func (l *loop) yaml() string {
	var b strings.Builder
	kind, tcpPort, udpPort := "ClusterIP", "", ""
	if l.nodePort != 0 {
		kind = "NodePort"
		tcpPort, udpPort = fmt.Sprintf(", nodePort: %d", l.nodePort), fmt.Sprintf(", nodePort: %d", l.nodePort)
	}
	fmt.Fprintf(&b, "apiVersion: v1\nkind: Service\nmetadata: {name: %s, namespace: default}\nspec:\n  type: %s\n  clusterIP: %q\n", l.name, kind, l.vips()[0])
	fmt.Fprintf(&b, "  clusterIPs: [%s]\n  ipFamilyPolicy: RequireDualStack\n  ipFamilies: [IPv4, IPv6]\n", quoted(l.vips()))
	if len(l.external) > 0 {
		var texts []string
		for _, a := range l.external {
			texts = append(texts, a.String())
		}
		fmt.Fprintf(&b, "  externalIPs: [%s]\n", quoted(texts))
	}
	fmt.Fprintf(&b, "  ports:\n  - {name: t, port: %d, protocol: TCP%s}\n  - {name: u, port: %d, protocol: UDP%s}\n", l.port, tcpPort, l.port, udpPort)
	for _, a := range l.endpoint {
		f := family(a)
		fmt.Fprintf(&b, "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: %s-%s, namespace: default, labels: {kubernetes.io/service-name: %s}}\naddressType: %s\n",
			l.name, strings.ToLower(f), l.name, f)
		fmt.Fprintf(&b, "ports: [{name: t, port: %d, protocol: TCP}, {name: u, port: %d, protocol: UDP}]\nendpoints:\n- addresses: [%q]\n", l.target, l.target, a)
		if l.node != "" {
			fmt.Fprintf(&b, "  nodeName: %s\n", l.node)
		}
	}
	return b.String()
}

func hostAddrs(h *netns.Host) []netip.Addr { return []netip.Addr{h.IPv4, h.IPv6} }

// mayReturn is why connections of these tests are relayed.
const mayReturn = "endpoints' addresses may be Services'"

// TestEndpointInANodesNetworkIsServedAtItsOwnAddress has external IPs that are
// addresses of another node, where the endpoint itself has them, as an ingress in
// the node's network does; with and without the endpoint's nodeName, and with a
// second Service of the same endpoint. Every client must reach the endpoint,
// exactly once.
func TestEndpointInANodesNetworkIsServedAtItsOwnAddress(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		for _, node := range []string{"", "node2"} {
			for _, tracked := range []bool{false, true} {
				t.Run(fmt.Sprintf("nodeName %q, tracked %t", node, tracked), func(t *testing.T) {
					t.Parallel()
					servedAtItsOwnAddress(t, m, node, tracked)
				})
			}
		}
	})
}

func servedAtItsOwnAddress(t *testing.T, m mode, node string, tracked bool) {
	c := netns.NewCluster(t)
	if tracked {
		c.Node.TrackConnections(t)
	}
	c.Node2.WitnessTCP(t, 80)
	for _, a := range hostAddrs(c.Node2) {
		c.Node2.WitnessUDPAt(t, netip.AddrPortFrom(a, 80).String())
	}
	p := newClusterProxy(t, c)
	p.mode, p.relayed = m, mayReturn
	ingress := loop{name: "ingress", number: 20, port: 80, external: hostAddrs(c.Node2), endpoint: hostAddrs(c.Node2), target: 80, node: node}
	inside := loop{name: "inside", number: 21, port: 8080, endpoint: hostAddrs(c.Node2), target: 80, node: node}
	p.write("ingress.yaml", ingress.yaml())
	p.write("inside.yaml", inside.yaml())
	p.start(decisionFlags()...)
	n := 0 // connections that the proxy did not leave to the endpoint
	for _, from := range []client{{name: "pod", Host: c.Pods[0]}, {name: "node", Host: c.Node}, {name: "outside", Host: c.Outside}} {
		var to []netip.AddrPort
		for i, a := range hostAddrs(c.Node2) {
			to = append(to, netip.AddrPortFrom(a, 80), netip.AddrPortFrom(netip.MustParseAddr(ingress.vips()[i]), 80),
				netip.AddrPortFrom(netip.MustParseAddr(inside.vips()[i]), 8080))
		}
		for _, at := range to {
			for _, network := range m.networks() {
				if _, got := from.visit(network, at, nil, startTimeout); !strings.HasPrefix(got, "node2:80 ") {
					t.Errorf("%s to %s/%s: %s", from.name, at, network, got)
				}
				if network == "tcp" && at.Addr() != c.Node2.IPv4 && at.Addr() != c.Node2.IPv6 {
					n++
				}
			}
		}
	}
	values := must.Get(p.metrics())(t)
	if got := int(values["sluice_connections_opened_total"]); got < n || got > 2*n+10 {
		t.Errorf("%d connections and sessions for %d connections", got, n)
	}
	if node == "node2" && values["sluice_config_problems"] != 0 {
		t.Errorf("%v problems", values["sluice_config_problems"])
	}
	p.stop()
}

// TestServiceLeadsToAnotherClustersNodePort has a Service whose endpoint is a node
// port of another cluster with its own proxy. This cluster has a node port of the
// same number.
func TestServiceLeadsToAnotherClustersNodePort(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		c := netns.NewCluster(t)
		c.Remote[0].WitnessTCP(t, 8080)
		c.Remote[0].WitnessUDP(t, 8080)
		here, there := newClusterProxy(t, c), newProxy(t, c.Node2)
		here.mode, there.mode = m, m
		here.relayed, there.relayed = mayReturn, mayReturn
		web := loop{name: "web", number: 40, port: 80, nodePort: 30080, endpoint: hostAddrs(c.Pods[0]), target: 8080, node: "node"}
		remote := loop{name: "remote", number: 41, port: 80, endpoint: hostAddrs(c.Node2), target: 30080}
		here.write("web.yaml", web.yaml())
		here.write("remote.yaml", remote.yaml())
		web.endpoint, web.node = hostAddrs(c.Remote[0]), "node2"
		there.write("web.yaml", web.yaml())
		here.start(decisionFlags()...)
		there.start(decisionFlags("--hostname-override", "node2")...)
		for _, from := range []client{{name: "pod", Host: c.Pods[0]}, {name: "node", Host: c.Node}, {name: "outside", Host: c.Outside}} {
			for _, vip := range remote.vips() {
				at := netip.AddrPortFrom(netip.MustParseAddr(vip), remote.port)
				for _, network := range m.networks() {
					for range 4 { // the listening socket reads datagrams' TTL after the first one
						if _, got := from.visit(network, at, nil, startTimeout); !strings.HasPrefix(got, "pod-3:8080 ") {
							t.Errorf("%s to %s/%s: %s", from.name, at, network, got)
							break
						}
					}
				}
			}
		}
		here.stop()
		there.stop()
	})
}

// TestServicesThatLeadToThemselvesEnd has a Service whose endpoint is its own
// cluster IP; two Services whose endpoints are each other's external IPs, or each
// other's cluster IPs; and two whose endpoints are each other's node ports, on two
// nodes that both have a proxy. Connections and datagrams must end after at most
// two more proxies, and the nodes must be idle afterwards.
func TestServicesThatLeadToThemselvesEnd(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) {
		c := netns.NewCluster(t)
		vips := func(n int) []netip.Addr {
			return []netip.Addr{netip.MustParseAddr(fmt.Sprintf("10.96.0.%d", n)), netip.MustParseAddr(fmt.Sprintf("fd00:96::%d", n))}
		}
		// Addresses that are routed to node2, like announced addresses.
		one := []netip.Addr{netip.MustParseAddr("10.244.2.101"), netip.MustParseAddr("fd00:244:2::101")}
		two := []netip.Addr{netip.MustParseAddr("10.244.2.102"), netip.MustParseAddr("fd00:244:2::102")}
		services := []loop{
			{name: "self", number: 30, port: 80, endpoint: vips(30), target: 80},
			{name: "there", number: 31, port: 80, endpoint: vips(32), target: 80},
			{name: "back", number: 32, port: 80, endpoint: vips(31), target: 80},
			{name: "ext-self", number: 33, port: 81, external: one, endpoint: one, target: 81},
			{name: "ext-there", number: 34, port: 80, external: one, endpoint: two, target: 80},
			{name: "ext-back", number: 35, port: 80, external: two, endpoint: one, target: 80},
			{name: "port-there", number: 36, port: 80, nodePort: 30036, endpoint: hostAddrs(c.Node2), target: 30037, node: "node2"},
			{name: "port-back", number: 37, port: 80, nodePort: 30037, endpoint: hostAddrs(c.Node), target: 30036, node: "node"},
		}
		proxies := []*proxy{newClusterProxy(t, c), newProxy(t, c.Node2)}
		for i, p := range proxies {
			p.mode, p.relayed = m, mayReturn
			for _, s := range services {
				p.write(s.name+".yaml", s.yaml())
			}
			p.start(decisionFlags("--hostname-override", []string{"node", "node2"}[i], promptDials)...)
		}
		attempts := 0
		done := make(chan struct{}, 256)
		for i := range services {
			s := &services[i]
			to := []netip.AddrPort{}
			for _, a := range vips(s.number) {
				to = append(to, netip.AddrPortFrom(a, s.port))
			}
			for _, a := range s.external {
				to = append(to, netip.AddrPortFrom(a, s.port))
			}
			if s.nodePort != 0 {
				for _, h := range []*netns.Host{c.Node, c.Node2} {
					for _, a := range hostAddrs(h) {
						to = append(to, netip.AddrPortFrom(a, s.nodePort))
					}
				}
			}
			for _, at := range to {
				for _, network := range m.networks() {
					for _, from := range []client{{name: "pod", Host: c.Pods[0]}, {name: "node", Host: c.Node}} {
						attempts++
						go func() {
							defer func() { done <- struct{}{} }()
							from.visit(network, at, nil, time.Second) // no server answers
						}()
					}
				}
			}
		}
		for range attempts {
			<-done
		}
		// Each was accepted by at most two proxies. The client repeats datagrams,
		// which keep their session.
		for _, p := range proxies {
			wait.For(t, "connections end", startTimeout, func() error {
				values, err := p.metrics()
				if err != nil {
					return err
				}
				if got := values["sluice_connections_opened_total"]; got > float64(3*attempts) {
					t.Fatalf("%v connections and sessions for %d attempts", got, attempts)
				}
				for name, open := range values {
					if strings.HasPrefix(name, "sluice_connections_open{") && strings.Contains(name, "TCP") && open > 0 {
						return fmt.Errorf("%s is %v", name, open)
					}
				}
				return nil
			})
			// An endless loop runs a hundred times between two looks.
			last, same := map[string]float64{}, 0
			wait.For(t, "counters stand still with no client", startTimeout, func() error {
				now, err := p.metrics()
				if err != nil {
					return err
				}
				for _, name := range []string{"sluice_relayed_datagrams_total", "sluice_connections_opened_total"} {
					if now[name] != last[name] {
						err = fmt.Errorf("%s grew from %v to %v", name, last[name], now[name])
					}
				}
				if last, same = now, same+1; err != nil {
					same = 0
					return err
				}
				if same < 10 {
					return errNotYet
				}
				return nil
			})
			for _, what := range []string{"endpoint 10.96.0.30:80/TCP is a cluster IP", "endpoint [fd00:96::32]:80/UDP is a cluster IP"} {
				p.awaitLog(what)
			}
			p.stop()
		}
	})
}
