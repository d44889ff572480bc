package e2e

import (
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// kernelState is everything that steering could leave in the node's kernel:
// rulesets and sets of all kinds of netfilter, the policy rules, all routes, and
// sysctls.
func kernelState(t *testing.T, lab *netns.Lab) string {
	t.Helper()
	return stateOf(t, lab.Node)
}

func stateOf(t *testing.T, node *netns.Host) string {
	t.Helper()
	var b strings.Builder
	for _, command := range [][]string{
		{"nft", "list", "ruleset"},
		{"iptables-legacy-save"},
		{"ip6tables-legacy-save"},
		{"ipset", "save"},
		{"ip", "-4", "rule"},
		{"ip", "-6", "rule"},
		{"ip", "-4", "route", "show", "table", "all"},
		{"ip", "-6", "route", "show", "table", "all"},
		{"ip", "address", "show"},
	} {
		out, err := node.Command(t, administration(t, command[0]), command[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
		}
		text := generations.ReplaceAllString(counters.ReplaceAllString(string(out), ""), "$1")
		if strings.HasSuffix(command[0], "-save") {
			text = emptyTable.ReplaceAllString(comments.ReplaceAllString(text, ""), "")
		}
		b.WriteString("# " + strings.Join(command, " ") + "\n" + text)
	}
	var pins []string
	for _, dir := range pinDirs(t, node) {
		found, _ := filepath.Glob(filepath.Join(dir, "*"))
		pins = append(pins, found...)
	}
	fmt.Fprintf(&b, "# pins of BPF\n%s\n", strings.Join(pins, "\n"))
	for _, key := range []string{
		"net/ipv4/conf/all/rp_filter", "net/ipv4/conf/lo/rp_filter", "net/ipv4/conf/all/route_localnet",
		"net/ipv4/conf/all/src_valid_mark", "net/ipv4/ip_nonlocal_bind", "net/ipv4/ip_local_reserved_ports",
		"net/ipv4/ip_local_port_range", "net/ipv6/conf/all/forwarding", "net/ipv4/ip_forward",
	} {
		value := must.Get(node.Sysctl(key))(t)
		b.WriteString(key + " = " + value + "\n")
	}
	return b.String()
}

var (
	// Packet and byte counters are not part of the state, nor are dates.
	// Sets of nftables have the number of their generation in their names.
	generations = regexp.MustCompile(`\b((?:steer|take|refuse|silent|cluster|local|foreign|linger|own|ownport|node|counted)[46])-\d+\b`)
	counters    = regexp.MustCompile(`\[\d+:\d+\]|packets \d+ bytes \d+`)
	comments    = regexp.MustCompile(`(?m)^# .*\n`)
	// emptyTable is a table of iptables-legacy that some program has listed: the
	// kernel creates it then, and no program can remove it.
	emptyTable = regexp.MustCompile(`\*\w+\n(:[A-Z]+ ACCEPT \n)+COMMIT\n`)
)

// settledState is kernelState once all interfaces are up. A new lab's interfaces
// take some milliseconds.
func settledState(t *testing.T, lab *netns.Lab) string {
	t.Helper()
	state := ""
	wait.For(t, "the lab's interfaces are up", startTimeout, func() error {
		state = kernelState(t, lab)
		interfaces := 1 + len(lab.Backends)
		if strings.Contains(state, "linkdown") || strings.Count(state, "\nlocal fe80::") < interfaces {
			return errorText("not yet: " + state)
		}
		return nil
	})
	return state
}

// administration finds a program that may be missing in PATH.
func administration(t *testing.T, name string) string {
	t.Helper()
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	path := filepath.Join("/usr/sbin", name)
	if _, err := os.Stat(path); err != nil {
		if os.Getenv("SLUICE_REQUIRE_ROOT") == "1" {
			t.Fatalf("the program %s is missing", name)
		}
		t.Skipf("SKIP-NEEDS: the program %s (test/install-deps.sh installs it)", name)
	}
	return path
}

// change is one line that only one of the two states has.
func changes(before, after string) string {
	count := map[string]int{}
	for line := range strings.Lines(before) {
		count[line]--
	}
	for line := range strings.Lines(after) {
		count[line]++
	}
	var b strings.Builder
	for line, n := range count {
		for ; n > 0; n-- {
			b.WriteString("+ " + line)
		}
		for ; n < 0; n++ {
			b.WriteString("- " + line)
		}
	}
	return b.String()
}

// addOthersState creates another program's state, which resembles ours.
func addOthersState(t *testing.T, lab *netns.Lab) {
	t.Helper()
	for _, command := range [][]string{
		{"nft", "add table ip6 others; add chain ip6 others pre { type filter hook prerouting priority mangle; policy accept; }; add rule ip6 others pre meta mark set 0x4"},
		{"nft", "add table inet others; add set inet others seen { type ipv4_addr; }; add element inet others seen { 192.0.2.1 }"},
		{"ip", "-4", "rule", "add", "priority", "999", "fwmark", "0x999/0xfff", "lookup", "999"},
		{"ip", "-6", "rule", "add", "priority", "999", "fwmark", "0x999/0xfff", "lookup", "999"},
		{"ip", "-4", "route", "add", "local", "198.51.100.0/24", "dev", "lo", "table", "999"},
		{"ip", "-4", "route", "add", "local", "203.0.113.0/24", "dev", "lo", "table", "local"},
	} {
		must.Run(t, lab.Node.Command(t, administration(t, command[0]), command[1:]...))
	}
}

func webOn(lab *netns.Lab) webService {
	hosts := make([]netip.AddrPort, 0, 2*len(lab.Backends))
	for _, b := range lab.Backends {
		hosts = append(hosts, on(8080, b)...)
	}
	return webService{name: "web", vips: []string{vip4, vip6}, port: 80, endpoints: hosts}
}

// TestPromise6_StopAndCleanupLeaveNothing compares the kernel's whole state before
// and after, with another program's state beside ours.
func TestPromise6_StopAndCleanupLeaveNothing(t *testing.T) {
	t.Parallel()
	forModes(t, playCleanup)
}

func playCleanup(t *testing.T, m mode) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	addOthersState(t, lab)
	before := settledState(t, lab)
	p := prepareProxy(t, lab, []webService{webOn(lab)})
	p.mode = m

	for _, end := range []string{"stop", "kill -9 and cleanup"} {
		p.start()
		must.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
		if kernelState(t, lab) == before {
			t.Fatal("nothing in the kernel changed while it ran: the comparison would prove nothing")
		}
		if end == "stop" {
			p.stop()
		} else {
			p.kill()
			if out, err := sluice(t, lab, "cleanup"); err != nil {
				t.Fatalf("cleanup: %v\n%s", err, out)
			}
		}
		check.Textf(t, changes(before, kernelState(t, lab)), "", "%s left", end)
	}
	if out, err := sluice(t, lab, "cleanup"); err != nil {
		t.Errorf("cleanup with nothing to clean: %v\n%s", err, out)
	}
}

// TestPromise6_KilledProxyIsTakenOver kills the proxy while clients connect, and
// starts another one with the first one's kernel state in place.
func TestPromise6_KilledProxyIsTakenOver(t *testing.T) {
	t.Parallel()
	forModes(t, playTakeOver)
}

func playTakeOver(t *testing.T, m mode) {
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	before := settledState(t, lab)
	p := startMode(t, lab, m, []webService{webOn(lab)})
	held := must.Get(lab.Client.Dial("tcp", addresses(80, vip4)[0]))(t)
	defer held.Close()
	must.OK(t, must.Err(netns.AskOn(held)))
	p.kill()
	if forwarded() {
		line := []byte("on\n")
		check.OK(t, must.Err(held.Write(line)))
		if _, err := io.ReadFull(held, line); err != nil || string(line) != "on\n" {
			t.Errorf("a connection that the kernel forwards ended with the proxy: %q, %v", line, err)
		}
	} else if err := ended(held); !isReset(err) {
		t.Errorf("the killed proxy's connection ended with %v, want a reset", err)
	}
	everRefused, refused := refused, refused
	if m.lacks(lateRefusals) {
		refused = unanswered
	}
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, address := range addresses(80, vip4, vip6) {
			if forwarded() { // the kernel decides about the Service by itself
				got, err := from.Ask("tcp", address)
				if err != nil && from == lab.Node { // the proxy did not know yet what looks at the node's own packets
					got, err = "b", refused(from, address)
				}
				if err != nil || !strings.HasPrefix(got, "b") {
					t.Errorf("%s to %s, while no proxy serves: %q, %v", from.Name(), address, got, err)
				}
				continue
			}
			check.OKf(t, refused(from, address), "%s to %s, while no proxy serves", from.Name(), address)
		}
	}
	// The service changed while no proxy ran.
	changed := webOn(lab)
	changed.port = 81
	p.apply(changed)
	p.start()
	for _, address := range addresses(81, vip4, vip6) {
		check.OKf(t, must.Err(lab.Client.Ask("tcp", address)), "%s after the restart", address)
	}
	for _, address := range addresses(80, vip4, vip6) {
		check.OKf(t, everRefused(lab.Client, address), "%s, which the killed proxy served", address)
	}
	p.stop()
	check.Textf(t, changes(before, kernelState(t, lab)), "", "left")
}

// TestSecondRunReportsTheFirstAndExits also expects the first proxy to be
// unaffected.
func TestSecondRunReportsTheFirstAndExits(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	first := startProxy(t, lab, []webService{webOn(lab)})
	during := settledState(t, lab)

	for _, round := range []string{"while the first runs", "while one runs over the leftovers of a killed one"} {
		second := prepareProxy(t, lab, []webService{webOn(lab)})
		second.launch()
		second.waitExit()
		check.Equalf(t, second.cmd.ProcessState.ExitCode(), 1, "%s: exit status of the second", round)
		if holder := fmt.Sprintf("process %d ", first.cmd.Process.Pid); !second.stderr.Contains(holder) {
			t.Errorf("%s: it did not say that %s is in its way:\n%s", round, holder, second.stderr)
		}
		if out, err := sluice(t, lab, "cleanup"); err == nil {
			t.Errorf("%s: cleanup took the running proxy's state away:\n%s", round, out)
		}
		check.Textf(t, changes(during, kernelState(t, lab)), "", "%s: changes of the kernel's state", round)
		check.OKf(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])), "%s", round)
		if round == "while the first runs" {
			first.kill()
			first.start()
			during = kernelState(t, lab)
		}
	}
	first.stop()
}

// TestPromise6_RemovedStateIsRepaired removes all of the proxy's kernel state, as
// the reload of a firewall does.
func TestPromise6_RemovedStateIsRepaired(t *testing.T) {
	t.Parallel()
	forModes(t, playRepair)
}

func playRepair(t *testing.T, m mode) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	before := settledState(t, lab)
	p := startMode(t, lab, m, []webService{webOn(lab)})
	held := hold(t, lab.Client, addresses(80, vip4)[0], 1)
	during := settledState(t, lab) // with the state for the client's replies
	for _, command := range [][]string{
		{"nft", "flush", "ruleset"},
		{"ip", "-4", "route", "flush", "table", "all", "root", "10.96.0.0/16"},
		{"ip", "-6", "route", "flush", "table", "all", "root", "fd00:96::/112"},
	} {
		out, err := lab.Node.Command(t, administration(t, command[0]), command[1:]...).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", strings.Join(command, " "), err, out)
		}
	}
	wait.For(t, "everything is there again", repairTimeout, func() error {
		if diff := changes(during, kernelState(t, lab)); diff != "" {
			return errorText(diff)
		}
		values, err := p.metrics()
		if err == nil && values["sluice_steering_repairs_total"] == 0 {
			err = errorText("nothing was repaired")
		}
		return err
	})
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, address := range addresses(80, vip4, vip6) {
			check.OKf(t, must.Err(from.Ask("tcp", address)), "%s to %s", from.Name(), address)
		}
	}
	alive(t, held)
	p.stop()
	check.Textf(t, changes(before, kernelState(t, lab)), "", "left")
}

// repairTimeout is the time within which the proxy must check its kernel state
// again.
const repairTimeout = 45 * time.Second
