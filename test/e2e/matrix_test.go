package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/netns"
)

// Destinations of each Service of the matrix. They contain its number, so that no
// two Services share a cluster IP, a port, a node port or a server.
var (
	nonLocalIPs = []string{"203.0.113.10", "2001:db8:113::10"}
	lbIPs       = []string{"198.51.100.10", "2001:db8:51::10"}
	proxiedIPs  = []string{"198.51.100.30", "2001:db8:51::30"}
	ownIPs      = []string{"10.1.0.50", "fd00:1::50"}
)

// row is a Service of the matrix, and the results of its clients: a pod on the
// node, the node itself, a client outside, and a stranger, who is outside too.
// "here client" is the endpoint on this node, which sees the client's own address;
// "there node" is the endpoint on the other node, which sees this node's address;
// "any" is either of them.
type row struct {
	name               string
	endpoints          string // here, there; with - terminating, with ! not ready
	internal, external string // traffic policies
	ranges             string // loadBalancerSourceRanges
	atClusterIP        string
	atOthers           string // external IPs, load balancer IPs, node ports
	atLoadBalancer     string // where source ranges change it
}

var matrix = []row{
	// The policies (A3.2, A3.3), and whose address the endpoint sees (A3.8, A3.9).
	{"cluster", "here there", "", "", "", "any client, any node, any node, any node", "any node, any node, any node, any node", ""},
	{"internal-local", "here there", "Local", "", "", "here client, here node, here node, here node", "any node, any node, any node, any node", ""},
	{"external-local", "here there", "", "Local", "", "any client, any node, any node, any node", "any client, any node, here client, here client", ""},
	{"local", "here there", "Local", "Local", "", "here client, here node, here node, here node", "any client, any node, here client, here client", ""},
	// No endpoint on this node (A3.5). Pods and the node itself bypass that rule
	// except at cluster IPs (A3.6).
	{"internal-elsewhere", "there", "Local", "", "", "silent, silent, silent, silent", "there node, there node, there node, there node", ""},
	{"external-elsewhere", "there", "", "Local", "", "there client, there node, there node, there node", "there client, there node, silent, silent", ""},
	{"elsewhere", "there", "Local", "Local", "", "silent, silent, silent, silent", "there client, there node, silent, silent", ""},
	// Terminating endpoints (A2.4, A2.5).
	{"terminating", "here- there-", "", "", "", "any client, any node, any node, any node", "any node, any node, any node, any node", ""},
	{"terminating-here", "here- there", "Local", "Local", "", "here client, here node, here node, here node", "there client, there node, here client, here client", ""},
	{"terminating-there", "here there-", "", "", "", "here client, here node, here node, here node", "here node, here node, here node, here node", ""},
	// No endpoint at all (A3.4, A2.7).
	{"empty", "", "", "", "", "refused, refused, refused, refused", "refused, refused, refused, refused", ""},
	{"empty-local", "", "Local", "Local", "", "refused, refused, refused, refused", "refused, refused, refused, refused", ""},
	{"unready", "here! there!", "", "Local", "", "refused, refused, refused, refused", "refused, refused, refused, refused", ""},
	// Source ranges (A3.10), with the node's own address (A3.11).
	{"ranges", "here there", "", "", "outside", "any client, any node, any node, any node", "any node, any node, any node, any node", "silent, silent, any node, silent"},
	{"ranges-node", "here there", "", "", "outside node", "any client, any node, any node, any node", "any node, any node, any node, any node", "silent, any node, any node, silent"},
	{"ranges-local", "here there", "", "Local", "outside", "any client, any node, any node, any node", "any client, any node, here client, here client", "silent, silent, here client, silent"},
	{"ranges-elsewhere", "there", "", "Local", "outside pod", "there client, there node, there node, there node", "there client, there node, silent, silent", "there client, silent, silent, silent"},
	{"ranges-all", "here there", "", "", "all", "any client, any node, any node, any node", "any node, any node, any node, any node", ""},
}

// world is the cluster of a matrix, and the place of everything in it.
type world struct {
	*netns.Cluster
	network   string // "tcp" or "udp", of all Services
	nodeAddrs []netip.Addr
	clients   []client
	services  []*object
}

// newWorld builds the cluster, its servers and a Service for each row.
func newWorld(t *testing.T, network string, rows []row) *world {
	t.Helper()
	c := netns.NewCluster(t)
	w := &world{Cluster: c, network: network, nodeAddrs: c.NodeAddrs(t)}
	w.clients = []client{
		{name: "pod", Host: c.Pods[1]},
		{name: "node", Host: c.Node},
		{name: "outside", Host: c.Outside, bind: []netip.Addr{c.Outside.IPv4, c.Outside.IPv6}},
		{name: "stranger", Host: c.Outside, bind: netns.Strangers},
	}
	for i, r := range rows {
		w.services = append(w.services, w.service(i, r))
		for _, h := range []*netns.Host{c.Pods[0], c.Remote[0]} {
			w.serve(t, h, fmt.Sprintf(":%d", w.services[i].target))
		}
	}
	return w
}

// serve runs a server of the world's network.
func (w *world) serve(t *testing.T, h *netns.Host, address string) {
	t.Helper()
	if w.network == "udp" {
		h.WitnessUDPAt(t, address)
		return
	}
	h.WitnessTCPAt(t, address)
}

func (w *world) service(i int, r row) *object {
	o := &object{
		name: r.name, vips: []string{fmt.Sprintf("10.96.0.%d", 10+i), fmt.Sprintf("fd00:96::%x", 10+i)},
		port: uint16(1000 + i), nodePort: uint16(30000 + i), target: uint16(8000 + i),
		externalIPs: slices.Concat(nonLocalIPs, ownIPs), lbIPs: lbIPs, lbProxied: proxiedIPs,
		internal: r.internal, external: r.external, protocol: corev1.Protocol(strings.ToUpper(w.network)),
	}
	for _, text := range strings.Fields(r.ranges) {
		o.ranges = append(o.ranges, map[string][]string{
			"outside": {"10.1.0.2/32", "fd00:1::2/128"}, "node": {"10.1.0.1/32", "fd00:1::1/128"},
			"pod": {"10.244.1.3/32", "fd00:244:1::3/128"}, "all": {"10.1.0.2/32", "0.0.0.0/0", "::/0"},
		}[text]...)
	}
	for _, text := range strings.Fields(r.endpoints) {
		e := endpoint{host: w.Pods[0], node: "node"}
		if strings.HasPrefix(text, "there") {
			e = endpoint{host: w.Remote[0], node: "node2"}
		}
		switch {
		case strings.HasSuffix(text, "-"):
			e.state = terminating
		case strings.HasSuffix(text, "!"):
			e.state = unready
		}
		o.endpoints = append(o.endpoints, e)
	}
	return o
}

// crossing is one connection of the matrix.
type crossing struct {
	service *object
	client  client
	kind    string
	to      netip.AddrPort
	want    []string // any of them, by the table; nil if it has no entry
	answer  answer
}

func (x *crossing) String() string {
	return fmt.Sprintf("%s to %s of %s, %s", x.client.name, x.kind, x.service.name, x.to)
}

// crossings lists the connections of the matrix. selected tells which addresses of
// the node have node ports.
func (w *world) crossings(t *testing.T, selected func(netip.Addr) bool) []*crossing {
	t.Helper()
	var list []*crossing
	for i, r := range matrix {
		o := w.services[i]
		if r.atLoadBalancer == "" {
			r.atLoadBalancer = r.atOthers
		}
		for _, kind := range kinds {
			want := r.atOthers
			switch kind {
			case clusterIP:
				want = r.atClusterIP
			case loadBalancerIP:
				want = r.atLoadBalancer
			case proxiedIP:
				want = ""
			}
			for _, to := range o.at(kind) {
				for n, c := range w.clients {
					x := &crossing{service: o, client: c, kind: kind, to: to}
					switch {
					case to.Addr().IsLoopback() && c.name != "node":
						continue
					case to.Port() == o.nodePort && !selected(to.Addr()), want == "":
						x.want = []string{w.realName(to) + " client"}
						if c.name == "node" {
							x.want = []string{w.realName(to) + " node"}
						}
					default:
						x.want = w.named(strings.Split(want, ", ")[n], o)
					}
					list = append(list, x)
				}
			}
		}
	}
	return list
}

// at returns a Service's destinations of a kind, of both families.
func (o *object) at(kind string) []netip.AddrPort {
	addrs, port := o.vips, o.port
	switch kind {
	case nonLocalExternalIP:
		addrs = nonLocalIPs
	case ownExternalIP:
		addrs = ownIPs
	case loadBalancerIP:
		addrs = lbIPs
	case proxiedIP:
		addrs = proxiedIPs
	case nodePort:
		addrs, port = []string{"10.1.0.1", "fd00:1::1"}, o.nodePort
	case otherNodePort:
		addrs, port = []string{"10.1.1.1", "fd00:1:1::1"}, o.nodePort
	case loopbackPort:
		addrs, port = []string{"127.0.0.1", "::1"}, o.nodePort
	}
	var list []netip.AddrPort
	for _, a := range addrs {
		list = append(list, netip.AddrPortFrom(netip.MustParseAddr(a), port))
	}
	return list
}

// named returns the results that a word of the table stands for.
func (w *world) named(word string, o *object) []string {
	where, source, ok := strings.Cut(word, " ")
	if !ok {
		return []string{word}
	}
	var list []string
	for _, h := range []*netns.Host{w.Pods[0], w.Remote[0]} {
		if where == "any" || (where == "here") == (h == w.Pods[0]) {
			list = append(list, fmt.Sprintf("%s:%d %s", h.Name(), o.target, source))
		}
	}
	return list
}

// realName is the name of the server at a host's own address.
func (w *world) realName(a netip.AddrPort) string {
	if slices.Contains(netns.NonLocalIPs, a.Addr()) {
		return fmt.Sprintf("world:%d", a.Port())
	}
	return fmt.Sprintf("node:%d", a.Port())
}

// explained translates explain's answer into a client's result.
func (w *world) explained(x *crossing, from netip.Addr) []string {
	a := x.answer
	switch a.Verdict {
	case "refuse":
		return []string{"refused"}
	case "drop":
		return []string{"silent"}
	case "none":
		source := "client"
		if x.client.name == "node" {
			source = "node"
		}
		return []string{w.realName(x.to) + " " + source}
	}
	var list []string
	for _, text := range a.Candidates {
		at := netip.MustParseAddrPort(text)
		source := a.Source
		if at.Addr() == from || x.client.name == "node" {
			source = "node" // its own address, in both cases
		}
		for _, h := range append(w.Hosts(), w.Node) {
			if h.IPv4 == at.Addr() || h.IPv6 == at.Addr() {
				list = append(list, fmt.Sprintf("%s:%d %s", h.Name(), at.Port(), source))
			}
		}
	}
	return list
}

// TestMatrix connects each kind of client to each kind of destination under each
// policy. explain's answers must agree with the table, and the clients' results
// must agree with explain.
func TestMatrix(t *testing.T) {
	t.Parallel()
	for _, variant := range []struct {
		name     string
		flags    []string
		selected func(netip.Addr) bool
	}{
		{"node ports on all addresses", nil, func(a netip.Addr) bool { return a != netip.IPv6Loopback() }}, // A4.5
		{"node ports in ranges", []string{"--nodeport-addresses", "10.1.0.0/24,fd00:1::/64"},
			func(a netip.Addr) bool {
				return a == netip.MustParseAddr("10.1.0.1") || a == netip.MustParseAddr("fd00:1::1")
			}},
		{"node ports on primary and localhost", []string{"--nodeport-addresses", "primary,localhost"},
			func(a netip.Addr) bool {
				return a.IsLoopback() || a == netip.MustParseAddr("10.1.0.1") || a == netip.MustParseAddr("fd00:1::1")
			}},
	} {
		for i, m := range modes {
			if i > 0 && variant.flags != nil {
				continue // all of them decide and listen in the same way
			}
			for _, network := range m.networks() {
				t.Run(m.name+"/"+network+"/"+variant.name, func(t *testing.T) {
					t.Parallel()
					newWorld(t, network, matrix).play(t, m, variant.selected, decisionFlags(variant.flags...))
				})
			}
		}
	}
}

// play runs the proxy and makes all connections of the matrix that the mode can
// serve.
func (w *world) play(t *testing.T, m mode, selected func(netip.Addr) bool, flags []string) {
	p := w.proxy(t, m)
	list := w.crossings(t, selected)
	w.explain(t, p, list, flags)
	w.serveTheRest(t, list)
	list = slices.DeleteFunc(list, func(x *crossing) bool { return m.lacks(x.kind) })
	p.start(flags...)
	got := crowd(len(list), 32, func(i int) visit {
		x, patience := list[i], startTimeout
		if x.answer.Verdict == "drop" || x.answer.Verdict == "refuse" && m.lacks(nonLocalRefusals) {
			patience = silence
		}
		_, said := x.client.visit(w.network, x.to, w.nodeAddrs, patience)
		return visit{name: said}
	})
	outcomes := map[string]int{}
	for i, x := range list {
		nonLocal := x.kind == nonLocalExternalIP || x.kind == loadBalancerIP
		if m.lacks(nonLocalRefusals) && nonLocal && x.to.Addr().Is4() && x.answer.Verdict == "refuse" {
			x.want = []string{"silent"}
		}
		if m.lacks(clientAddresses) && x.answer.Verdict == "accept" {
			for i := range x.want {
				x.want[i] = strings.Replace(x.want[i], " client", " node", 1)
			}
		}
		if !slices.Contains(x.want, got[i].name) {
			t.Errorf("%s: %s, want %s (%v)", x, got[i].name, strings.Join(x.want, " or "), x.answer.Rules)
		}
		outcomes[x.answer.Verdict]++
	}
	t.Logf("%d connections: %v", len(list), outcomes)
	p.stop()
}

// proxy prepares a proxy for the world's Services.
func (w *world) proxy(t *testing.T, m mode) *proxy {
	t.Helper()
	p := newClusterProxy(t, w.Cluster)
	p.mode = m
	for _, o := range w.services {
		p.put(o)
	}
	return p
}

// explain asks about all connections and compares the answers with the table.
func (w *world) explain(t *testing.T, p *proxy, list []*crossing, flags []string) {
	t.Helper()
	questions := make([]question, len(list))
	for i, x := range list {
		questions[i] = question{Protocol: w.network, From: x.client.from(t, x.to).String(), To: x.to.String()}
	}
	for i, a := range p.explain(t, w.nodeAddrs, questions, flags...) {
		x := list[i]
		x.answer = a
		if said := w.explained(x, netip.MustParseAddr(questions[i].From)); !slices.Equal(said, x.want) {
			t.Errorf("%s: explain says %s by %v, want %s", x, strings.Join(said, " or "), a.Rules, strings.Join(x.want, " or "))
		}
	}
}

// serveTheRest runs other hosts' servers at addresses that Sluice must leave
// alone.
func (w *world) serveTheRest(t *testing.T, list []*crossing) {
	t.Helper()
	done := map[netip.AddrPort]bool{}
	for _, x := range list {
		if x.answer.Verdict != "none" || done[x.to] {
			continue
		}
		done[x.to] = true
		host := w.Node
		if slices.Contains(netns.NonLocalIPs, x.to.Addr()) {
			host = w.World
		}
		w.serve(t, host, x.to.String())
	}
}
