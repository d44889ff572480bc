package e2e

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
)

// sourceRows are the Services of the table of client addresses.
var sourceRows = []row{
	{name: "here", endpoints: "here"},
	{name: "there", endpoints: "there"},
	{name: "both", endpoints: "here there"},
	{name: "local-here", endpoints: "here there", external: "Local"},
	{name: "local-there", endpoints: "there", external: "Local"},
}

// sightings lists whose address the endpoint of a Service sees. The client
// "endpoint" is the endpoint on this node itself.
var sightings = []struct {
	client, service, kind string
	want                  string // one of these
}{
	// A pod's own address, to an endpoint on the same node and on another one (A3.9).
	{"pod", "here", clusterIP, "here client"},
	{"pod", "there", clusterIP, "there client"},
	{"pod", "both", clusterIP, "any client"},
	// Hairpin: only the endpoint that is the client itself must see the node
	// (A3.8).
	{"endpoint", "here", clusterIP, "here node"},
	{"endpoint", "there", clusterIP, "there client"},
	{"endpoint", "both", clusterIP, "here node|there client"},
	{"endpoint", "here", nodePort, "here node"},
	{"endpoint", "local-here", loadBalancerIP, "here node|there client"},
	// The node's own connections (A3.8).
	{"node", "here", clusterIP, "here node"},
	{"node", "there", clusterIP, "there node"},
	{"node", "both", nonLocalExternalIP, "any node"},
	{"node", "local-there", nodePort, "there node"},
	{"node", "local-here", loopbackPort, "any node"},
	// From outside, under policy Cluster (A3.8).
	{"outside", "both", clusterIP, "any node"},
	{"outside", "here", loadBalancerIP, "here node"},
	{"outside", "there", nodePort, "there node"},
	{"outside", "both", nonLocalExternalIP, "any node"},
	{"outside", "both", ownExternalIP, "any node"},
	// From outside, under policy Local (A3.9).
	{"outside", "local-here", loadBalancerIP, "here client"},
	{"outside", "local-here", nodePort, "here client"},
	{"outside", "local-here", otherNodePort, "here client"},
	{"outside", "local-here", nonLocalExternalIP, "here client"},
	{"outside", "local-here", ownExternalIP, "here client"},
	{"stranger", "local-here", loadBalancerIP, "here client"},
	// Pods that bypass policy Local keep their address (A3.6).
	{"pod", "local-there", loadBalancerIP, "there client"},
	{"pod", "local-there", nodePort, "there client"},
	{"pod", "local-here", ownExternalIP, "any client"},
	// Under policy Cluster they do not (A3.8).
	{"pod", "both", loadBalancerIP, "any node"},
	{"pod", "both", nodePort, "any node"},
}

// TestPromise2_EndpointSeesTheClientsAddressWhereItMust compares the client's
// address that servers report with the table, with explain, and with the access
// log. Meanwhile other clients connect to the same servers without a Service.
func TestPromise2_EndpointSeesTheClientsAddressWhereItMust(t *testing.T) {
	t.Parallel()
	forModes(t, playSightings)
}

func playSightings(t *testing.T, m mode) {
	for _, network := range m.networks() {
		t.Run(network, func(t *testing.T) { newWorld(t, network, sourceRows).sight(t, m) })
	}
}

func (w *world) sight(t *testing.T, m mode) {
	const rounds = 6 // of each connection, so that each endpoint gets one
	w.clients = append(w.clients, client{name: "endpoint", Host: w.Pods[0]})
	p := w.proxy(t, m)
	var list []*crossing
	for _, s := range sightings {
		if m.lacks(s.kind) {
			continue
		}
		o := w.services[slices.IndexFunc(w.services, func(o *object) bool { return o.name == s.service })]
		c := w.clients[slices.IndexFunc(w.clients, func(c client) bool { return c.name == s.client })]
		for _, to := range o.at(s.kind) {
			if to.Addr() == netip.IPv6Loopback() {
				continue // it has node ports only on request (A4.5)
			}
			x := &crossing{service: o, client: c, kind: s.kind, to: to}
			for word := range strings.SplitSeq(s.want, "|") {
				x.want = append(x.want, w.named(word, o)...)
			}
			list = append(list, x)
		}
	}
	w.explain(t, p, list, decisionFlags())
	p.start(decisionFlags()...)

	direct := w.goPast(t)
	type meeting struct {
		own  netip.AddrPort
		said string
	}
	met := make([]meeting, rounds*len(list))
	crowd(len(met), 8, func(i int) visit {
		x := list[i%len(list)]
		met[i].own, met[i].said = x.client.visit(w.network, x.to, w.nodeAddrs, startTimeout)
		return visit{}
	})
	direct()
	type way struct{ client, vip netip.AddrPort } // a client may use a port twice, to two addresses
	seen := map[way]string{}
	for i, have := range met {
		x := list[i%len(list)]
		want := x.want
		if m.lacks(clientAddresses) {
			want = []string{}
			for _, text := range x.want {
				want = append(want, strings.Replace(text, " client", " node", 1))
			}
		}
		if !slices.Contains(want, have.said) {
			t.Errorf("%s: %s, want %s (%v)", x, have.said, strings.Join(want, " or "), x.answer.Rules)
		}
		_, source, _ := strings.Cut(have.said, " ")
		seen[way{have.own, x.to}] = source
	}
	p.stop() // this ends the UDP sessions
	compared := 0
	for _, r := range p.records() {
		if source, ok := seen[way{r.Client, r.VIP}]; ok {
			compared++
			check.Equalf(t, r.Source, source, "%s to %s of %s: the record's source, as the endpoint saw it", r.Client, r.VIP, r.Service)
		}
	}
	t.Logf("%d connections of %d kinds, %d records compared", len(met), len(list), compared)
	expected := len(met)
	if w.network == "udp" {
		expected = len(seen) // a client that gets the same port again soon is in the same session (A8.9)
	}
	check.Equalf(t, compared, expected, "records of %d connections", expected)
}

// goPast connects clients to the endpoints themselves, on the Services' ports and
// on the target ports, from any port and from the highest ones. The function that
// it returns stops that, and expects that each client reached the server itself,
// which saw the client's own address.
func (w *world) goPast(t *testing.T) (end func()) {
	t.Helper()
	var stop atomic.Bool
	var running sync.WaitGroup
	var count atomic.Int64
	o := w.services[0]
	for _, h := range []*netns.Host{w.Pods[0], w.Remote[0]} {
		w.serve(t, h, fmt.Sprintf(":%d", o.port))
	}
	clients := []client{
		{name: "pod", Host: w.Pods[1]}, {name: "node", Host: w.Node}, {name: "outside", Host: w.Outside}, {name: "remote pod", Host: w.Remote[0]},
	}
	for _, c := range clients {
		running.Go(func() {
			for i := 0; !stop.Load(); i++ {
				server := []*netns.Host{w.Pods[0], w.Remote[0]}[i&1]
				port := []uint16{o.target, o.port}[i>>1&1]
				to := netip.AddrPortFrom(server.IPv4, port)
				if i>>2&1 == 1 {
					to = netip.AddrPortFrom(server.IPv6, port)
				}
				want := fmt.Sprintf("%s:%d client", server.Name(), port)
				if c.name == "node" {
					want = strings.Replace(want, "client", "node", 1)
				}
				if _, got := c.visit(w.network, to, w.nodeAddrs, startTimeout); got != want {
					t.Errorf("%s past the proxy to %s: %s, want %s", c.name, to, got, want)
				}
				count.Add(1)
			}
		})
	}
	return func() {
		stop.Store(true)
		running.Wait()
		if count.Load() < int64(len(clients)) {
			t.Errorf("only %d connections past the proxy: it proves nothing", count.Load())
		}
		t.Logf("%d connections past the proxy", count.Load())
	}
}
