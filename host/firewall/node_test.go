package firewall

import (
	"testing"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/test/bench/world"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// What rules do with the packets of the node's own connections is found, in chains that others lead to,
// too. The rules of the kubelet and of CNI plugins judge none.
func TestReadOnNode(t *testing.T) {
	nft := func(kind, hook, rules string) string {
		return "table ip x {\nchain other {\nip saddr 10.0.0.1 drop\n}\nchain passes {\naccept\n}\nchain c {\ntype " + kind + " hook " + hook + " priority 0\n" + rules + "\n}\n}\n"
	}
	save := func(table, rules string) string { return "*" + table + "\n" + rules + "\nCOMMIT\n" }
	const chain = "the chain c of nftables' table x"
	judges, nothing := OnNode{Judges: chain}, OnNode{}
	for _, c := range []struct {
		name, program, text string
		want                OnNode
	}{
		{"nothing", "", "", nothing},
		{"no rules", "nft", nft("filter", "output", ""), nothing},
		{"drops", "nft", nft("filter", "output", "ip saddr 10.0.0.1 counter drop"), judges},
		{"drops what comes in", "nft", nft("filter", "input", "tcp dport 22 drop"), judges},
		{"drops before routing", "nft", nft("filter", "prerouting", "tcp dport 22 drop"), judges},
		{"rejects", "nft", nft("filter", "output", "tcp dport 22 reject"), judges},
		{"the policy", "nft", nft("filter", "input", "policy drop"), judges},
		{"a map of verdicts", "nft", nft("filter", "input", "ct state vmap { established : accept, invalid : drop }"), judges},
		{"a set", "nft", nft("filter", "input", "ip saddr { 10.0.0.1, 10.0.0.2 } log accept"), nothing},
		{"a jump", "nft", nft("filter", "output", "jump other"), judges},
		{"a jump to what accepts", "nft", nft("filter", "output", "goto passes"), nothing},
		{"a mark", "nft", nft("filter", "output", "meta mark set 1"), judges},
		{"the type of service", "nft", nft("filter", "postrouting", "ip dscp set 8"), judges},
		{"no tracking", "nft", nft("filter", "output", "notrack"), judges},
		{"forwarded packets", "nft", nft("filter", "forward", "jump other"), OnNode{Forwards: chain}},
		{"a destination", "nft", nft("nat", "output", "tcp dport 8088 dnat to 10.0.0.1:80"), nothing},
		{"a source", "nft", nft("nat", "postrouting", "oif lo snat to 10.0.0.1"), judges},
		{"masquerade", "nft", nft("nat", "postrouting", "masquerade random,persistent"), OnNode{Translates: chain}},
		{"a mark for translation", "nft", nft("nat", "output", "meta mark set meta mark | 0x2000"), nothing},
		{"an interface", "nft", "table netdev x {\nchain c {\ntype filter hook ingress device lo priority 0\n}\n}\n", judges},
		{"our table", "nft", "table inet mine {\nchain c {\ntype filter hook output priority 0\ndrop\n}\n}\n", nothing},
		{"kube-proxy's table", "nft", "table ip kube-proxy {\nchain c {\ntype filter hook output priority 0\ndrop\n}\n}\n", nothing},
		{"a cluster's node", "iptables-nft-restore", world.Rules("10.2.0.0/16", "10.2.1.2"), OnNode{Translates: "the chain POSTROUTING of nftables' table nat"}},
		{"our chains", "iptables-nft-restore", save("raw", ":MINE-OUTPUT - [0:0]\n-A OUTPUT -j MINE-OUTPUT\n-A MINE-OUTPUT -j CT --notrack"), nothing},
		{"Calico", "iptables-nft-restore", save("filter", ":cali-OUTPUT - [0:0]\n-A OUTPUT -j cali-OUTPUT\n-A cali-OUTPUT -j DROP"), OnNode{Judges: "the chain OUTPUT of nftables' table filter"}},
		{"a firewall", "iptables-nft-restore", save("filter", "-A INPUT -m conntrack --ctstate INVALID -j DROP"), OnNode{Judges: "the chain INPUT of nftables' table filter"}},
		{"NETMAP", "iptables-nft-restore", save("nat", "-A POSTROUTING -j NETMAP --to 10.0.0.0/8"), OnNode{Judges: "the chain POSTROUTING of nftables' table nat"}},
		{"MSS", "iptables-nft-restore", save("mangle", "-A POSTROUTING -p tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"), OnNode{Judges: "the chain POSTROUTING of nftables' table mangle"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			node := netns.NewLab(t, 0).Node
			loadBy(t, node, c.program, c.text)
			conn := must.Get(kernel.OpenNFTables(node.FD()))(t)
			defer conn.Close()
			if got, err := ReadOnNode(conn, "mine"); err != nil || got != c.want {
				t.Errorf("%+v, %v; want %+v", got, err, c.want)
			}
		})
	}
}
