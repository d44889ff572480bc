package kubeproxy

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// restored is what kube-proxy's iptables mode leaves, in short, beside things
// of others.
const restored = `*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-ERIFXISQEP7F7OF4 - [0:0]
:KUBE-SEP-AAAA - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-POSTROUTING - [0:0]
:KUBE-KUBELET-CANARY - [0:0]
:THEIRS - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A PREROUTING -j THEIRS
-A POSTROUTING -j KUBE-POSTROUTING
-A KUBE-SERVICES -d 10.96.0.10/32 -p udp -m udp --dport 53 -j KUBE-SVC-ERIFXISQEP7F7OF4
-A KUBE-SVC-ERIFXISQEP7F7OF4 -j KUBE-SEP-AAAA
-A KUBE-SEP-AAAA -p udp -j DNAT --to-destination 10.2.1.2:53
-A KUBE-POSTROUTING -j MASQUERADE
-A THEIRS -s 10.9.9.9/32 -j KUBE-MARK-MASQ
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
COMMIT
*filter
:KUBE-FORWARD - [0:0]
:KUBE-FIREWALL - [0:0]
-A FORWARD -j KUBE-FORWARD
-A INPUT -j KUBE-FIREWALL
-A KUBE-FORWARD -m conntrack --ctstate INVALID -j DROP
COMMIT
`

func run(t *testing.T, n *netns.Host, input, program string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath(program); err != nil {
		t.Skipf("SKIP-NEEDS: %s", program)
	}
	cmd := n.Command(t, program, args...)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", program, err, out)
	}
	return string(out)
}

// What kube-proxy's modes left goes, with its tracked UDP flows, and nothing of
// the kubelet's or of others.
func TestRemove(t *testing.T) {
	for _, program := range []string{"iptables-nft", "iptables-legacy"} {
		t.Run(program, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoUDP(t, 53)
			run(t, lab.Node, restored, program+"-restore")
			conn := must.Get(nftables.New(nftables.WithNetNSFd(lab.Node.FD())))(t)
			for _, family := range []nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6} {
				kube := conn.AddTable(&nftables.Table{Name: "kube-proxy", Family: family})
				chain := conn.AddChain(&nftables.Chain{Table: kube, Name: "services"})
				conn.AddRule(&nftables.Rule{Table: kube, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}})
				conn.AddTable(&nftables.Table{Name: "theirs", Family: family})
			}
			must.OK(t, conn.Flush())
			for _, to := range []string{"10.96.0.10:53", "10.2.1.2:53"} { // one through the rules, one not
				c := must.Get(lab.Client.Dial("udp", to))(t)
				_, _ = c.Write([]byte("hello"))
				must.OKf(t, must.Err(c.Read(make([]byte, 10))), "%s", to)
				_ = c.Close()
			}
			flows := func() (n int) {
				list := must.Get(lab.Node.Netlink().ConntrackTableList(netlink.ConntrackTable, netlink.FAMILY_V4))(t)
				return len(list)
			}
			must.Equalf(t, flows(), 2, "flows are tracked")
			leftovers := func(want ...string) {
				t.Helper()
				check.OK(t, sys.InNetNS(lab.Node.FD(), func() error {
					found, err := Leftovers()
					check.EqualSlices(t, found, want)
					return err
				}))
			}
			chains := map[string]string{"iptables-nft": "%d iptables-nft chains KUBE-…", "iptables-legacy": "%d chains KUBE-… of iptables-legacy"}[program]
			leftovers("the nftables table kube-proxy", fmt.Sprintf(chains, 6))
			removed, err := Remove(lab.Node.FD())
			variant := strings.TrimPrefix(program, "iptables-")
			want := []string{
				"table ip kube-proxy", "table ip6 kube-proxy",
				"iptables (" + variant + ") filter chain KUBE-FORWARD",
				"iptables (" + variant + ") nat chain KUBE-POSTROUTING",
				"iptables (" + variant + ") nat chain KUBE-SEP-AAAA",
				"iptables (" + variant + ") nat chain KUBE-SERVICES",
				"iptables (" + variant + ") nat chain KUBE-SVC-ERIFXISQEP7F7OF4",
				"1 tracked UDP flows to Services",
			}
			if err != nil || !slices.Equal(removed, want) {
				t.Errorf("%v: removed\n%s\nwant\n%s", err, strings.Join(removed, "\n"), strings.Join(want, "\n"))
			}
			check.Equalf(t, flows(), 1, "flows that are tracked: the one of others")
			left := run(t, lab.Node, "", program+"-save")
			for _, rule := range []string{"-A PREROUTING -j THEIRS", "-A INPUT -j KUBE-FIREWALL", ":KUBE-KUBELET-CANARY", "-A KUBE-MARK-MASQ -j MARK"} {
				check.Contains(t, left, rule)
			}
			if strings.Contains(left, "KUBE-S") || strings.Contains(left, "KUBE-POSTROUTING") || strings.Contains(left, "KUBE-FORWARD") {
				t.Errorf("left:\n%s", left)
			}
			tables := must.Get(conn.ListTables())(t)
			if slices.ContainsFunc(tables, func(t *nftables.Table) bool { return t.Name == "kube-proxy" }) {
				t.Error("a table is left")
			}
			chain := map[string]string{"nft": "iptables (nft) nat chain KUBE-MARK-MASQ", "legacy": "iptables (legacy) chain KUBE-MARK-MASQ"}[variant]
			if err := sys.InNetNS(lab.Node.FD(), func() error {
				kept, err := Kept()
				if !slices.Equal(kept, []string{chain}) {
					t.Errorf("kept %q, want %s", kept, chain)
				}
				return err
			}); err != nil {
				t.Error(err)
			}
			leftovers(fmt.Sprintf(chains, 1))
			if again, err := Remove(lab.Node.FD()); err != nil || len(again) != 0 {
				t.Errorf("again: %q, %v", again, err)
			}
		})
	}
}

func TestAddressesOf(t *testing.T) {
	got := addressesOf([]string{"-A KUBE-SERVICES -d 10.96.0.1/32 -p tcp -j X", "-A Y ! -d 10.0.0.1/32 -j Z", "-A Y -d 10.0.0.0/8 -j Z", "-A Y -d"})
	check.EqualSlices(t, got, []netip.Addr{netip.MustParseAddr("10.96.0.1")})
}
