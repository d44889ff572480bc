package e2e

import (
	"fmt"
	"slices"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestNodePortsAtLoopback plays what docs/steering.md says: 127.0.0.1 has node ports by default,
// ::1 only if it is named.
func TestNodePortsAtLoopback(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	for _, tt := range []struct {
		flags      []string
		ipv4, ipv6 bool
	}{
		{nil, true, false},
		{[]string{"--nodeport-addresses", "127.0.0.0/8,::1/128"}, true, true},
		{[]string{"--nodeport-addresses", "localhost"}, true, true},
		{[]string{"--iptables-localhost-nodeports=false"}, false, false},
		{[]string{"--proxy-mode", "nftables"}, false, false},
	} {
		p := newProxy(t, lab.Node)
		p.put(webAtNodePort(lab))
		p.start(tt.flags...)
		for address, want := range map[string]bool{"127.0.0.1": tt.ipv4, "::1": tt.ipv6} {
			got, err := lab.Node.Ask("tcp", addresses(30080, address)[0])
			check.Equalf(t, err == nil, want, "flags %q: %s says %q, %v", tt.flags, address, got, err)
		}
		p.stop()
	}
}

func webAtNodePort(lab *netns.Lab) *object {
	return &object{name: "web", vips: []string{vip4, vip6}, port: 80, nodePort: 30080, target: 8080, endpoints: []endpoint{{host: lab.Backends[0], node: "elsewhere"}}}
}

// TestNodePortsMeetTheNodesFirewall plays what docs/compared-with-kube-proxy.md says of a firewall
// that drops by default: INPUT judges what is relayed, by the port that the client used, and
// FORWARD what the kernel forwards, by the endpoint's.
func TestNodePortsMeetTheNodesFirewall(t *testing.T) {
	t.Parallel()
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			p := newProxy(t, lab.Node)
			p.put(webAtNodePort(lab))
			p.start("--datapath", path)
			at := addresses(30080, lab.Node.IPv4.String(), lab.Node.IPv6.String())
			for _, address := range at { // the relay serves the first ones
				wait.For(t, address+" is served by "+path, startTimeout, func() error {
					c, err := lab.Client.Dial("tcp", address)
					if err != nil {
						return err
					}
					defer c.Close()
					if _, err := netns.AskOn(c); err != nil {
						return err
					}
					_ = c.Close()
					records, err := readRecords(p.accessLog)
					if err == nil && !slices.ContainsFunc(records, func(r record) bool { return r.VIP.String() == address && r.Path == path }) {
						err = errNotYet
					}
					return err
				})
			}
			for hook, port := range map[string]int{"input": 30080, "forward": 8080} {
				judged := hook == "input" == (path == "relay")
				for _, open := range []bool{false, true} {
					rules := fmt.Sprintf("add table inet firewall; add chain inet firewall judge { type filter hook %s priority 0; policy drop; }; ", hook) +
						"add rule inet firewall judge iifname != client accept; add rule inet firewall judge meta l4proto ipv6-icmp accept"
					if open {
						rules += fmt.Sprintf("; add rule inet firewall judge tcp dport %d accept", port)
					}
					lab.Node.NFT(t, rules)
					for _, address := range at {
						if judged && !open {
							check.OKf(t, unanswered(lab.Client, address), "%s of %s drops by default", hook, address)
						} else if got, err := lab.Client.Ask("tcp", address); err != nil {
							t.Errorf("%s of %s, port %d open %v: %q, %v", hook, address, port, open, got, err)
						}
					}
					lab.Node.NFT(t, "delete table inet firewall")
				}
			}
			p.stop()
		})
	}
}
