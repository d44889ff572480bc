package firewall

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/netns"
)

// load gives a text to nft, or to one of iptables' programs.
func load(t *testing.T, n *netns.Host, text string, program string, args ...string) {
	t.Helper()
	cmd := n.Command(t, program, args...)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s\n%s", program, err, out, text)
	}
}

// loadBy loads rules by nft or by a program of iptables; without a program, none.
func loadBy(t *testing.T, n *netns.Host, program, text string) {
	t.Helper()
	switch program {
	case "":
	case "nft":
		load(t, n, text, "nft", "-f", "-")
	default:
		if _, err := exec.LookPath(program); err != nil {
			t.Skip("SKIP-NEEDS: " + program)
		}
		load(t, n, text, program)
	}
}

// TestStateRule finds rules that decide by the state of connections, and no others.
func TestStateRule(t *testing.T) {
	nft := func(family, table, chain, rule string) string {
		return "table " + family + " " + table + " {\nchain base {\ntype filter hook forward priority 0\n}\nchain " + chain + " {\n" + rule + "\n}\n}\n"
	}
	save := func(chain, rule string) string {
		return "*filter\n:" + chain + " - [0:0]\n-A FORWARD -j " + chain + "\n-A " + chain + " " + rule + "\nCOMMIT\n"
	}
	for _, c := range []struct{ name, program, text, want string }{
		{"nothing", "", "", ""},
		{"accept", "nft", nft("inet", "firewall", "in", "ct state established accept"), "chain in of the nftables table firewall"},
		{"a map of verdicts", "nft", nft("ip6", "firewall", "in", "ct state vmap { established : accept, invalid : drop }"), "chain in of the nftables table firewall"},
		{"a counter", "nft", nft("inet", "firewall", "in", "ct state established counter"), ""},
		{"a mark of the connection", "nft", nft("inet", "firewall", "in", "ct mark 1 accept"), ""},
		{"kube-proxy's table", "nft", nft("ip", "kube-proxy", "filter-forward", "ct state invalid drop"), ""},
		{"our table", "nft", nft("inet", "mine", "to4", "ct state established accept"), ""},
		{"another table of that name", "nft", nft("ip", "mine", "in", "ct state established accept"), "chain in of the nftables table mine"},
		{"translation", "nft", "table ip x {\nchain in {\ntype nat hook prerouting priority -100\nct state new dnat to 10.0.0.1\n}\n}\n", ""},
		{"iptables", "iptables-nft-restore", save("cali-fw-1", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"), "chain cali-fw-1 of the nftables table filter"},
		{"the old match", "ip6tables-nft-restore", save("fw", "-m state --state ESTABLISHED -j ACCEPT"), "chain fw of the nftables table filter"},
		{"kube-proxy's chain", "iptables-nft-restore", save("KUBE-FORWARD", "-m conntrack --ctstate INVALID -j DROP"), ""},
		{"kube-router's chain", "iptables-nft-restore", save("KUBE-POD-FW-A", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"), "chain KUBE-POD-FW-A of the nftables table filter"},
		{"legacy", "iptables-legacy-restore", save("cali-fw-1", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"), "chain cali-fw-1 of the table filter of iptables-legacy"},
		{"legacy IPv6", "ip6tables-legacy-restore", save("fw", "-m conntrack --ctstate INVALID -j DROP"), "chain fw of the table filter of ip6tables-legacy"},
		{"a built-in chain", "iptables-legacy-restore", "*filter\n-A INPUT -m conntrack --ctstate INVALID -j DROP\nCOMMIT\n", "a built-in chain of the table filter of iptables-legacy"},
		{"legacy, kube-proxy's chain", "iptables-legacy-restore", save("KUBE-FORWARD", "-m conntrack --ctstate INVALID -j DROP"), ""},
		{"legacy, by address", "iptables-legacy-restore", save("fw", "-s 10.0.0.1 -p tcp -m tcp --dport 80 -j DROP"), ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			node := netns.NewLab(t, 0).Node
			loadBy(t, node, c.program, c.text)
			got, err := StateRule(node.FD(), "mine")
			if err != nil || got != c.want {
				t.Errorf("%q, %v; want %q", got, err, c.want)
			}
		})
	}
}

// TestTranslation finds chains that may translate sources, and no others.
func TestTranslation(t *testing.T) {
	nft := func(family, table, hook string) string {
		return "table " + family + " " + table + " {\nchain base {\ntype " + hook + " priority 0\n}\n}\n"
	}
	for _, c := range []struct{ name, program, text, want string }{
		{"nothing", "", "", ""},
		{"a firewall", "nft", nft("inet", "others", "filter hook forward"), ""},
		{"destinations", "nft", nft("ip", "others", "nat hook prerouting"), ""},
		{"sources", "nft", nft("ip", "others", "nat hook postrouting"), "chain base of the nftables table others"},
		{"ours", "nft", nft("inet", "mine", "nat hook postrouting"), ""},
		{"kube-proxy's", "nft", nft("ip", "kube-proxy", "nat hook postrouting"), ""},
		{"iptables", "ip6tables-nft-restore", "*nat\n-A POSTROUTING -j MASQUERADE\nCOMMIT\n", "chain POSTROUTING of the nftables table nat"},
		{"legacy", "iptables-legacy-restore", "*nat\n-A POSTROUTING -j MASQUERADE\nCOMMIT\n", "the table nat of iptables-legacy"},
	} {
		t.Run(c.name, func(t *testing.T) {
			node := netns.NewLab(t, 0).Node
			loadBy(t, node, c.program, c.text)
			if got, err := Translation(node.FD(), "mine"); err != nil || got != c.want {
				t.Errorf("%q, %v; want %q", got, err, c.want)
			}
		})
	}
}

// TestSourceCheck finds rules that look up the way to packets' sources, and no others.
func TestSourceCheck(t *testing.T) {
	for rule, want := range map[string]string{
		"meta nfproto ipv6 fib saddr . mark . iif oif missing drop": "chain pre of the nftables table firewalld",
		"fib saddr . iif oif exists accept":                         "chain pre of the nftables table firewalld",
		"fib daddr type local accept":                               "",
		"fib saddr type broadcast drop":                             "",
	} {
		node := netns.NewLab(t, 0).Node
		load(t, node, "table inet firewalld {\nchain pre {\ntype filter hook prerouting priority -140\n"+rule+"\n}\n}\n", "nft", "-f", "-")
		var got string
		if err := node.Do(func() (err error) {
			got, err = SourceCheck("mine")
			return err
		}); err != nil || got != want {
			t.Errorf("%s: %q, %v; want %q", rule, got, err, want)
		}
	}
}

// FuzzDecidesByState has no expressions of a rule end the program.
func FuzzDecidesByState(f *testing.F) {
	f.Add([]byte{8, 0, 1, 0, 'c', 't', 0, 0})
	f.Fuzz(func(_ *testing.T, b []byte) { decidesByState(b) })
}
