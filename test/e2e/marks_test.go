package e2e

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// marker is another program on the node that routes by marks, or looks up packets'
// sources with their marks: a row of the table in docs/steering.md.
type marker struct {
	name string
	// table is the content of a table of nftables.
	table string
	// commands are of ip, iptables or sysctl. "-A" and "add" are undone by "-D" and "del";
	// "iptables" and "ip rule" stand for those of both families.
	commands []string
}

// established are rules by state, which many firewalls have in front of their check.
const established = "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"

// markers are those that Sluice is tried beside.
var markers = []marker{
	{name: "firewalld", table: `
		chain pre {
			type filter hook prerouting priority -140
			icmpv6 type { nd-router-advert, nd-neighbor-solicit, nd-neighbor-advert } accept
			meta nfproto ipv6 fib saddr . mark . iif oif missing drop
		}`},
	{name: "firewalld at raw", table: `
		chain pre {
			type filter hook prerouting priority -290
			icmpv6 type { nd-router-advert, nd-neighbor-solicit, nd-neighbor-advert } accept
			meta nfproto ipv6 fib saddr . mark . iif oif missing drop
		}`},
	{name: "NixOS nftables", table: `
		chain pre {
			type filter hook prerouting priority -140; policy drop
			icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept
			meta nfproto ipv4 udp sport . udp dport { 67 . 68, 68 . 67 } accept
			fib saddr . mark . iif oif exists accept
		}`},
	{name: "a check behind rules by state", table: `
		chain pre {
			type filter hook prerouting priority -140; policy drop
			ct state established,related accept
			icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert } accept
			fib saddr . mark . iif oif exists accept
		}`},
	{name: "NixOS iptables", commands: []string{"iptables -t mangle -A PREROUTING -m rpfilter --validmark --invert -j DROP"}},
	{name: "NixOS iptables behind rules by state", commands: []string{
		"iptables -t mangle -A PREROUTING " + established, "iptables -t mangle -A PREROUTING -m rpfilter --validmark --invert -j DROP"}},
	{name: "Calico", commands: []string{
		"iptables -t raw -A PREROUTING -i b1 -j MARK --set-xmark 0x40000/0x40000",
		"iptables -t raw -A PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP",
		"iptables -t mangle -A PREROUTING -m mark --mark 0x10000/0x10000 -j ACCEPT",
		"iptables -t mangle -A PREROUTING " + established}},
	{name: "Cilium", commands: []string{
		"ip route add local 0.0.0.0/0 dev lo table 2004", "ip -6 route add local ::/0 dev lo table 2004",
		"ip rule add fwmark 0x200/0xf00 lookup 2004 pref 9",
		"iptables -t mangle -A PREROUTING -m socket --transparent -m mark ! --mark 0xe00/0xf00 -m mark ! --mark 0x800/0xf00 -j MARK --set-xmark 0x200/0xffffffff",
		"iptables -t raw -A PREROUTING -m mark --mark 0x200/0xf00 -j NOTRACK"}},
	{name: "kube-router", commands: []string{
		"ip route add local 0.0.0.0/0 dev lo table 78", "ip -6 route add local ::/0 dev lo table 78",
		"ip rule add fwmark 0x4ca8 lookup 78 pref 32764", "ip rule add lookup 77 pref 32765",
		"iptables -t mangle -A PREROUTING -j MARK --set-xmark 0x0/0x10000",
		"iptables -t mangle -A POSTROUTING -j MARK --set-xmark 0x20000/0x20000"}},
	{name: "WireGuard", table: `
		chain preraw {
			type filter hook prerouting priority -300
			iifname != "client" ip daddr 10.200.0.2 fib saddr type != local drop
		}
		chain premangle {
			type filter hook prerouting priority -150
			meta l4proto udp meta mark set ct mark
		}
		chain postmangle {
			type filter hook postrouting priority -150
			meta l4proto udp meta mark 0xca6c ct mark set meta mark
		}`,
		commands: []string{
			"ip route add 0.0.0.0/0 dev client table 51820", "ip -6 route add ::/0 dev client table 51820",
			"ip rule add not fwmark 0xca6c lookup 51820 pref 32765",
			"ip rule add lookup main suppress_prefixlength 0 pref 32764",
			"sysctl -qw net.ipv4.conf.all.src_valid_mark=1"}},
	{name: "Tailscale", commands: []string{
		"ip rule add fwmark 0x80000/0xff0000 lookup main pref 5210", "ip rule add fwmark 0x80000/0xff0000 lookup default pref 5230",
		"ip rule add fwmark 0x80000/0xff0000 unreachable pref 5250", "ip rule add lookup 52 pref 5270",
		"iptables -A FORWARD -i tailscale0 -j MARK --set-xmark 0x40000/0xff0000",
		"iptables -A FORWARD -m mark --mark 0x40000/0xff0000 -j ACCEPT"}},
	{name: "AWS VPC CNI", commands: []string{
		"ip rule add fwmark 0x80/0x80 lookup main pref 1024",
		"iptables -t mangle -A PREROUTING -i client -m addrtype --dst-type LOCAL --limit-iface-in -j CONNMARK --set-xmark 0x80/0x80",
		"iptables -t mangle -A PREROUTING -i b1 -j CONNMARK --restore-mark --nfmask 0x80 --ctmask 0x80"}},
}

// TestNeighboursThatUseMarks has Sluice beside programs that route by marks, or drop
// packets whose source is elsewhere, as they look it up with the packet's mark. Clients
// are answered, and endpoints see their addresses.
func TestNeighboursThatUseMarks(t *testing.T) {
	t.Parallel()
	forModes(t, func(t *testing.T, m mode) { beside(t, m) })
	t.Run("kernel", func(t *testing.T) { beside(t, modes[0], "--datapath", "kernel") })
}

func beside(t *testing.T, m mode, flags ...string) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	o := &object{name: "dns", vips: []string{vip4, vip6}, port: dnsPort, target: 5353, protocol: corev1.ProtocolUDP, twin: true,
		endpoints: []endpoint{{host: b, node: "other"}}}
	b.WitnessUDP(t, o.target)
	b.WitnessTCP(t, o.target)
	p := newProxy(t, lab.Node)
	p.mode = m
	p.put(o)
	p.start(append([]string{promptDials}, flags...)...)
	check := func(n marker) {
		t.Helper()
		beside := n.name
		for f, address := range addresses(dnsPort, vip4, vip6) {
			client := []netip.Addr{lab.Client.IPv4, lab.Client.IPv6}[f]
			for _, network := range []string{"tcp", "udp"} {
				if !n.stops(m, network) {
					wait.For(t, beside+": client asks "+address+" by "+network, askTimeout, func() error {
						got, err := see(lab.Client, network, address)
						if err == nil && got != client {
							err = fmt.Errorf("the endpoint saw %s", got)
						}
						return err
					})
				}
				direct := netip.AddrPortFrom([]netip.Addr{b.IPv4, b.IPv6}[f], o.target).String()
				wait.For(t, beside+": client asks the endpoint "+direct+" by "+network, askTimeout, func() error {
					_, err := see(lab.Client, network, direct)
					return err
				})
				if !n.stops(m, "node") {
					wait.For(t, beside+": node asks "+address+" by "+network, askTimeout, func() error {
						_, err := see(lab.Node, network, address)
						return err
					})
				}
			}
		}
	}
	check(marker{name: "nobody"})
	for _, n := range markers {
		n.install(t, lab.Node)
		check(n)
		n.remove(t, lab.Node)
	}
	check(marker{name: "nobody any more"})
	p.stop()
}

// stops tells what does not work beside a program in a mode, as docs/steering.md says:
// clients' connections over a network, or the "node"'s own.
func (n marker) stops(m mode, what string) bool {
	switch {
	case strings.Contains(n.table, "fib saddr . mark"):
		// The kernel looks up the node's own packets, too, once tproxy has found their listener.
		return what == "node" && strings.HasPrefix(m.name, "tproxy")
	case n.name == "WireGuard": // it takes the mark that the BPF program has set
		return what == "udp" && m.name == "sklookup"
	}
	return false
}

// askTimeout bounds one question with its repetitions.
const askTimeout = 20 * time.Second

// see asks a witness and returns the address that it saw.
func see(from *netns.Host, network, address string) (saw netip.Addr, err error) {
	c, err := from.Dial(network, address)
	if err != nil {
		return saw, err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(2 * time.Second)); err != nil {
		return saw, err
	}
	if _, err := c.Write([]byte("who")); err != nil {
		return saw, err
	}
	buf := make([]byte, 200)
	n, err := c.Read(buf)
	if err != nil {
		return saw, err
	}
	line, _, _ := strings.Cut(string(buf[:n]), "\n")
	_, peer, _ := strings.Cut(line, " ")
	at, err := netip.ParseAddrPort(peer)
	return at.Addr(), err
}

func (n marker) install(t *testing.T, node *netns.Host) {
	t.Helper()
	if n.table != "" {
		shell(t, node, "nft '"+"table inet neighbour {"+n.table+"\n}'")
	}
	for _, c := range n.commands {
		shell(t, node, both(c)...)
	}
}

func (n marker) remove(t *testing.T, node *netns.Host) {
	t.Helper()
	if n.table != "" {
		shell(t, node, "nft delete table inet neighbour")
	}
	undo := strings.NewReplacer(" -A ", " -D ", " add ", " del ", "mark=1", "mark=0")
	for _, c := range n.commands {
		shell(t, node, both(undo.Replace(c))...)
	}
}

// both gives a command of one family for both.
func both(command string) []string {
	switch {
	case strings.HasPrefix(command, "iptables "):
		return []string{"iptables-nft -w" + command[len("iptables"):], "ip6tables-nft -w" + command[len("iptables"):]}
	case strings.HasPrefix(command, "ip rule "):
		return []string{command, "ip -6" + command[len("ip"):]}
	}
	return []string{command}
}

// shell runs commands on a node.
func shell(t *testing.T, node *netns.Host, commands ...string) {
	t.Helper()
	for _, text := range commands {
		if out, err := node.Command(t, "sh", "-c", text).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", text, err, out)
		}
	}
}
