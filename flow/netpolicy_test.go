package flow

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// policyCase is rules of a network policy engine on the node, and which clients they let
// reach a Service: pod-1 its endpoint pod-2 on the same node, pod-1 the endpoint pod-3 on
// another node, and outside pod-2.
type policyCase struct {
	name                  string
	rules                 string
	near, remote, outside bool
}

// Two styles of engines: chains for each pod's interface, with sets of peers; and one
// chain of connections' states, with a set of pairs. {near} and the like are addresses.
var policyCases = []policyCase{
	{"none", ``, true, true, true},

	{"ingress of pod-2 from pod-1", podChains(`oifname "pod-2"`, `{family} saddr { {client} } meta l4proto { tcp, udp } th dport 8080 accept`), true, true, false},
	{"ingress of pod-2 from outside", podChains(`oifname "pod-2"`, `{family} saddr { {outside} } meta l4proto { tcp, udp } th dport 8080 accept`), false, true, true},
	{"ingress of pod-2 from nobody", podChains(`oifname "pod-2"`, ``), false, true, false},
	{"ingress of pod-2 at the Service's port", podChains(`oifname "pod-2"`, `meta l4proto { tcp, udp } th dport 80 accept`), false, true, false},
	{"egress of pod-1 to pod-2", podChains(`iifname "pod-1"`, `{family} daddr { {near} } meta l4proto { tcp, udp } th dport 8080 accept`), true, false, true},
	{"egress of pod-1 to the Services", podChains(`iifname "pod-1"`, `{family} daddr { {vip}, {remotevip} } accept`), false, false, true},

	{"pairs of pod-1 and pod-2", states(`{family} saddr . {family} daddr . meta l4proto . th dport { {client} . {near} . tcp . 8080, {client} . {near} . udp . 8080 }`), true, false, false},
	{"all other pairs", states(`{family} saddr . {family} daddr . meta l4proto . th dport { {client} . {remote} . tcp . 8080, {client} . {remote} . udp . 8080, {outside} . {near} . tcp . 8080, {outside} . {near} . udp . 8080 }`), false, true, true},
	{"pairs with the Services", states(`{family} daddr . th dport { {vip} . 80, {remotevip} . 80 }`), false, false, false},
	{"all but invalid", states(``), true, true, true},
}

// originalCase is the one difference: rules may ask connection tracking for the address
// that a client used before DNAT. Kernel flows have changed it before connection tracking.
var originalCase = policyCase{"the Services, by connections' original address", states(`ct original {family} daddr { {vip}, {remotevip} }`), true, true, true}

// podChains are rules of a pod's interface: a packet of a new connection is dropped unless
// a rule accepts it.
func podChains(which, rule string) string {
	return `
	chain pod {
		ct state established,related accept
		` + rule + `
		drop
	}
	chain forward {
		type filter hook forward priority filter
		` + which + ` jump pod
	}`
}

// states are rules of connections' states.
func states(pairs string) string {
	return `
	chain forward {
		type filter hook forward priority filter; policy drop
		ct state invalid drop
		ct state established,related accept
		ct state new ` + pairs + ` accept
	}`
}

// policyNet is a cluster in which one data path serves.
type policyNet struct {
	*netns.Cluster
	ipv6       bool
	udpClients atomic.Int32
}

// Services of policyNet: one has pod-2, the other pod-3.
var policyVIPs = map[bool][2]string{false: {"10.96.0.10", "10.96.0.11"}, true: {"fd00:96::10", "fd00:96::11"}}

func (c *policyNet) addr(h *netns.Host) netip.Addr {
	if c.ipv6 {
		return h.IPv6
	}
	return h.IPv4
}

func (c *policyNet) fill(rules string) string {
	family := "ip"
	if c.ipv6 {
		family = "ip6"
	}
	vips := policyVIPs[c.ipv6]
	return strings.NewReplacer("{family}", family, "{client}", c.addr(c.Pods[0]).String(), "{near}", c.addr(c.Pods[1]).String(),
		"{remote}", c.addr(c.Remote[0]).String(), "{outside}", c.addr(c.Outside).String(), "{vip}", vips[0], "{remotevip}", vips[1]).Replace(rules)
}

// dnat serves as kube-proxy does.
func (c *policyNet) dnat(t *testing.T, masquerade bool) {
	rules := `table {family} nat {
	chain prerouting {
		type nat hook prerouting priority dstnat
		{family} daddr {vip} meta l4proto { tcp, udp } th dport 80 dnat to {near}:8080
		{family} daddr {remotevip} meta l4proto { tcp, udp } th dport 80 dnat to {remote}:8080
	}
	chain postrouting {
		type nat hook postrouting priority srcnat
		MASQUERADE
	}
}`
	hide := ""
	if masquerade {
		hide = "ct status dnat masquerade"
	}
	if c.ipv6 {
		rules = strings.NewReplacer("{near}:", "[{near}]:", "{remote}:", "[{remote}]:").Replace(rules)
	}
	c.Node.NFT(t, c.fill(strings.Replace(rules, "MASQUERADE", hide, 1)))
}

// flows serves by kernel flows.
func (c *policyNet) flows(t *testing.T, masquerade bool) *node {
	n := newNode(t, &netns.Lab{Node: c.Node}, nil)
	n.config.ClusterCIDRs = []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")}
	n.config.MasqueradeAll = masquerade
	vips := policyVIPs[c.ipv6]
	n.apply(svc(vips[0], nil, at(c.addr(c.Pods[1]), 8080)))
	n.apply(named("remote", svc(vips[1], nil, at(c.addr(c.Remote[0]), 8080))))
	return n
}

// try reports whether a question from a client's own address to a Service is answered. It
// waits long for an answer that is expected. UDP clients have a port that is used once: what
// earlier rules allowed goes on.
func (c *policyNet) try(client *netns.Host, network, vip string, expected bool) (string, bool) {
	limit := 250 * time.Millisecond
	if expected {
		limit = patience
	}
	own := c.addr(client).AsSlice() // a host may have several
	var local net.Addr = &net.TCPAddr{IP: own}
	if network == "udp" {
		local = &net.UDPAddr{IP: own, Port: 40000 + int(c.udpClients.Add(1))}
	}
	conn, err := client.Dialer(&net.Dialer{Timeout: limit, LocalAddr: local}, network, net.JoinHostPort(vip, "80"))
	if err != nil {
		return err.Error(), false
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(limit))
	said, err := line(conn)
	if err != nil {
		return err.Error(), false
	}
	return said, true
}

// line sends a line and returns the next one of the answer.
func line(c net.Conn) (string, error) {
	if _, err := c.Write([]byte("who?\n")); err != nil {
		return "", err
	}
	b := make([]byte, 256)
	n, err := c.Read(b)
	said, _, _ := strings.Cut(string(b[:n]), "\n")
	return said, err
}

// TestNetworkPolicies gives network policies the same connections by kernel flows as by
// kube-proxy's DNAT: the rules decide about client and endpoint, from the first packet on,
// and never see the Service's address.
func TestNetworkPolicies(t *testing.T) {
	netns.Require(t)
	for _, path := range []string{"dnat", "flows"} {
		for _, masquerade := range []bool{false, true} {
			for _, ipv6 := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s/masquerade=%v/ipv6=%v", path, masquerade, ipv6), func(t *testing.T) {
					t.Parallel()
					if masquerade && ipv6 && !full() {
						return // 6 s
					}
					c := &policyNet{Cluster: netns.NewCluster(t), ipv6: ipv6}
					for _, h := range []*netns.Host{c.Pods[1], c.Remote[0]} {
						h.WitnessTCP(t, 8080)
						h.WitnessUDP(t, 8080)
					}
					if path == "dnat" {
						c.dnat(t, masquerade)
						c.judge(t, masquerade, originalCase)
						return
					}
					c.flows(t, masquerade)
					other := originalCase
					other.near, other.remote, other.outside = false, false, false
					c.judge(t, masquerade, other)
				})
			}
		}
	}
}

// judge plays all cases, and one more.
func (c *policyNet) judge(t *testing.T, masquerade bool, more policyCase) {
	vips := policyVIPs[c.ipv6]
	open := must.Get(c.Pods[0].Dial("tcp", net.JoinHostPort(vips[0], "80")))(t)
	defer open.Close()
	for _, p := range append(slices.Clone(policyCases), more) {
		c.Node.NFT(t, "table inet engine {}\ndelete table inet engine\ntable inet engine {"+c.fill(p.rules)+"\n}")
		var asked sync.WaitGroup
		for _, a := range []struct {
			client   *netns.Host
			vip      string
			expected bool
		}{{c.Pods[0], vips[0], p.near}, {c.Pods[0], vips[1], p.remote}, {c.Outside, vips[0], p.outside}} {
			for _, network := range []string{"tcp", "udp"} {
				asked.Go(func() {
					said, allowed := c.try(a.client, network, a.vip, a.expected)
					check.Equalf(t, allowed, a.expected, "%s: %s by %s to %s: %q", p.name, a.client.Name(), network, a.vip, said)
					if _, peer, _ := strings.Cut(said, " "); allowed && strings.Contains(peer, c.addr(a.client).String()) == masquerade {
						t.Errorf("%s: the endpoint saw %s, masquerade %v", p.name, peer, masquerade)
					}
				})
			}
		}
		asked.Wait()
		_ = open.SetDeadline(time.Now().Add(patience))
		if said, err := line(open); err != nil {
			t.Errorf("%s: a connection that was open before: %q, %v", p.name, said, err)
		}
	}
}
