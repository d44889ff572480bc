// Package netpolicy loads rules as network policy engines write them on a node of a
// [netns.Cluster], and compares what they achieve with the table in
// docs/network-policy.md. The client is the second pod of the node, the endpoint the
// first.
package netpolicy

import (
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Case is what a policy wants.
type Case struct {
	Name    string
	Reached bool // the client reaches the endpoint through a Service
}

// Cases are played with each style.
var Cases = []Case{
	{"ingress deny", false},
	{"egress allow", true},
	{"server opens nothing", true},
}

// Style is how an engine judges packets.
type Style struct {
	Name  string
	rules map[string]string // for iptables-restore, by case
}

// The client is 10.244.1.3 behind the interface pod-2, the endpoint 10.244.1.2 behind pod-1.
const sets = `create np-client hash:ip
create np-endpoint hash:ip
create np-nobody hash:ip
add np-client 10.244.1.3
add np-endpoint 10.244.1.2
`

// established are the first rules of each pod's chain, in both styles.
func established(chain string) string {
	return "-A " + chain + " -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT\n-A " + chain + " -m conntrack --ctstate INVALID -j DROP\n"
}

// atInterfaces has a chain for what each pod sends, and one for what it gets by its
// interface, as Calico. What the node itself sends to pods passes no chain of a pod's.
func atInterfaces(sends, gets string) string {
	text := "*filter\n"
	for _, c := range []string{"cali-FORWARD", "cali-INPUT", "cali-from-wl", "cali-to-wl", "cali-fw-1", "cali-fw-2", "cali-tw-1", "cali-tw-2"} {
		text += ":" + c + " - [0:0]\n"
	}
	text += `-I FORWARD -j cali-FORWARD
-I INPUT -j cali-INPUT
-A cali-FORWARD -i pod-+ -j cali-from-wl
-A cali-FORWARD -o pod-+ -j cali-to-wl
-A cali-INPUT -i pod-+ -j cali-from-wl
-A cali-from-wl -i pod-1 -j cali-fw-1
-A cali-from-wl -i pod-2 -j cali-fw-2
-A cali-to-wl -o pod-1 -j cali-tw-1
-A cali-to-wl -o pod-2 -j cali-tw-2
`
	for _, chain := range []string{"cali-fw-1", "cali-fw-2", "cali-tw-1", "cali-tw-2"} {
		text += established(chain)
	}
	return text + sends + gets + "COMMIT\n"
}

// byAddresses has a chain for each pod, which everything from and to its address passes,
// also what the node sends and gets, as kube-router. Packets to the service range are not
// looked at on their way in. What no policy has marked is rejected.
func byAddresses(pod, policy string) string {
	text := "*filter\n"
	for _, c := range []string{"KUBE-ROUTER-INPUT", "KUBE-ROUTER-FORWARD", "KUBE-ROUTER-OUTPUT", "KUBE-POD-FW-A", "KUBE-NWPLCY-A"} {
		text += ":" + c + " - [0:0]\n"
	}
	text += "-A KUBE-ROUTER-INPUT -d 10.96.0.0/16 -j RETURN\n"
	for _, hook := range []string{"INPUT", "FORWARD", "OUTPUT"} {
		chain := "KUBE-ROUTER-" + hook
		text += fmt.Sprintf("-I %s -j %s\n-A %s -s %s -j KUBE-POD-FW-A\n", hook, chain, chain, pod)
		if hook != "INPUT" {
			text += fmt.Sprintf("-A %s -d %s -j KUBE-POD-FW-A\n", chain, pod)
		}
	}
	return text + established("KUBE-POD-FW-A") +
		"-A KUBE-POD-FW-A -d " + pod + " -m addrtype --src-type LOCAL -j ACCEPT\n" +
		"-A KUBE-POD-FW-A -j KUBE-NWPLCY-A\n" +
		"-A KUBE-POD-FW-A -m mark ! --mark 0x10000/0x10000 -j REJECT\n" +
		"-A KUBE-POD-FW-A -j MARK --set-xmark 0x0/0x10000\n" +
		policy + "COMMIT\n"
}

const marked = " -j MARK --set-xmark 0x10000/0x10000\n"

// Styles are those that are played.
var Styles = []Style{
	{"at pods' interfaces", map[string]string{
		"ingress deny":         atInterfaces("", "-A cali-tw-1 -m set --match-set np-nobody src -j RETURN\n-A cali-tw-1 -j DROP\n"),
		"egress allow":         atInterfaces("-A cali-fw-2 -m set --match-set np-endpoint dst -j RETURN\n-A cali-fw-2 -j DROP\n", ""),
		"server opens nothing": atInterfaces("-A cali-fw-1 -j DROP\n", ""),
	}},
	{"by pods' addresses", map[string]string{
		"ingress deny":         byAddresses("10.244.1.2", "-A KUBE-NWPLCY-A -m set --match-set np-nobody src -m set --match-set np-endpoint dst"+marked),
		"egress allow":         byAddresses("10.244.1.3", "-A KUBE-NWPLCY-A -m set --match-set np-client src -m set --match-set np-endpoint dst"+marked),
		"server opens nothing": byAddresses("10.244.1.2", "-A KUBE-NWPLCY-A -m set --match-set np-client src -m set --match-set np-endpoint dst"+marked),
	}},
}

// Load puts the rules of a case in force on a node, and returns what removes them.
func (s *Style) Load(t *testing.T, node *netns.Host, c Case) (unload func()) {
	t.Helper()
	run(t, node, sets, "ipset", "restore")
	rules := s.rules[c.Name]
	run(t, node, rules, "iptables-nft-restore", "--noflush")
	return func() {
		t.Helper()
		undo := "*filter\n"
		var chains string
		for line := range strings.Lines(rules) {
			if rest, is := strings.CutPrefix(line, "-I "); is {
				undo += "-D " + rest
			}
			if rest, is := strings.CutPrefix(line, ":"); is {
				name, _, _ := strings.Cut(rest, " ")
				undo += "-F " + name + "\n"
				chains += "-X " + name + "\n"
			}
		}
		run(t, node, undo+chains+"COMMIT\n", "iptables-nft-restore", "--noflush")
		run(t, node, "destroy np-client\ndestroy np-endpoint\ndestroy np-nobody\n", "ipset", "restore")
	}
}

// run gives a text to a program on a node. iptables and ipset are packages of Debian that
// other tests need too.
func run(t *testing.T, node *netns.Host, text, program string, args ...string) {
	t.Helper()
	cmd := node.Command(t, program, args...)
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s\n%s", program, err, out, text)
	}
}

// Play plays all cases of all styles by a data path, a column of the table. reached
// reports whether the client reaches the endpoint through the Service of that number, of
// which there are as many as styles and cases: the proxy may remember who did not answer. It
// waits longer for an answer that is expected, as a busy machine may be late with it.
func Play(t *testing.T, node *netns.Host, path string, reached func(service int, expected bool) bool) {
	t.Helper()
	documented, service := Documented(t), 0
	for _, s := range Styles {
		for _, c := range Cases {
			if !reached(service, true) {
				t.Fatal("without rules, the endpoint is not reached")
			}
			unload := s.Load(t, node, c)
			want := documented[s.Name+", "+c.Name][path]
			expected := c.Reached == (want == "holds")
			if got := s.achieves(c, func() bool { return reached(service, expected) }); got != want {
				t.Errorf("%s, %s, %s: %s, docs/network-policy.md says %q", path, s.Name, c.Name, got, want)
			}
			unload()
			service++
		}
	}
}

// achieves says whether a policy holds.
func (s *Style) achieves(c Case, reached func() bool) string {
	attempts := 1
	if !c.Reached {
		attempts = 4 // the relay must not take over what nobody answers
	}
	for range attempts {
		if reached() != c.Reached {
			return "fails"
		}
	}
	return "holds"
}

// Services is how many Services Play needs.
func Services() int { return len(Styles) * len(Cases) }

// Documented reads the table of docs/network-policy.md: what holds by style and case,
// then by data path, which are the names of the columns.
func Documented(t *testing.T) map[string]map[string]string {
	t.Helper()
	text := must.Read(t, "../../docs/network-policy.md")
	head := regexp.MustCompile(`(?m)^\| style \| case \| (.+) \|$`).FindSubmatch(text)
	if head == nil {
		t.Fatal("docs/network-policy.md has no table of styles and cases")
	}
	columns := strings.Split(string(head[1]), " | ")
	table := make(map[string]map[string]string)
	for _, s := range Styles {
		for _, c := range Cases {
			key := "| " + s.Name + " | " + c.Name + " | "
			_, rest, found := strings.Cut(string(text), "\n"+key)
			rest, _, _ = strings.Cut(rest, " |\n")
			cells := strings.Split(rest, " | ")
			if !found || len(cells) != len(columns) {
				t.Fatalf("docs/network-policy.md has no row %q with %d columns", key, len(columns))
			}
			row := make(map[string]string)
			for i, name := range columns {
				row[name] = cells[i]
			}
			table[s.Name+", "+c.Name] = row
		}
	}
	return table
}
