package doctor

import (
	"cmp"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"unicode/utf8"

	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/choose"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

// fake is a machine that a test describes: everything that it does not mention
// is fine.
type fake struct {
	ways             map[string]error
	scratch, answers error
	transparent      error
	ipv6, sctp       error
	flows            error
	unforwarded      []string
	nodeRules        string
	bpffs            error
	capabilities     uint64
	sysctls          map[string]string
	checks           []string
	files            uint64
	policies         []string
	engines          []firewall.Engine
	stateRule        string
	sourceCheck      string
	marks            error
	leftovers        []string
	pid              int
	running          bool
	unreadable       error
}

func healthy() *fake {
	return &fake{
		capabilities: ^uint64(0), files: 1 << 20,
		sysctls: map[string]string{
			"net/ipv4/ip_forward": "1", "net/ipv6/conf/all/forwarding": "1", "net/ipv4/conf/all/rp_filter": "0", "net/ipv4/conf/all/route_localnet": "0",
			"net/ipv4/ip_local_port_range": "32768\t60999", "net/bridge/bridge-nf-call-iptables": "1",
		},
	}
}

func (f *fake) Ways() []string                { return []string{"tproxy/nftables", "sklookup", "bind"} }
func (f *fake) Try(way string) error          { return f.ways[way] }
func (f *fake) Scratch() (_, _ error)         { return f.scratch, cmp.Or(f.scratch, f.answers) }
func (f *fake) Capabilities() (uint64, error) { return f.capabilities, f.unreadable }
func (f *fake) Transparent() error            { return f.transparent }
func (f *fake) IPv6() error                   { return f.ipv6 }
func (f *fake) SCTP() error                   { return f.sctp }
func (f *fake) Flows() error                  { return f.flows }
func (f *fake) Unforwarded() ([]string, error) {
	return f.unforwarded, f.unreadable
}
func (f *fake) NodeRules() (string, error) { return f.nodeRules, f.unreadable }
func (f *fake) BPFFS() error               { return f.bpffs }
func (f *fake) SourceChecks() ([]string, error) {
	return f.checks, f.unreadable
}
func (f *fake) Files() (uint64, uint64, error)            { return f.files, f.files, f.unreadable }
func (f *fake) LockedMemory() (uint64, uint64, error)     { return 8 << 20, ^uint64(0), f.unreadable }
func (f *fake) Leftovers() ([]string, error)              { return f.leftovers, f.unreadable }
func (f *fake) ForwardPolicies() ([]string, error)        { return f.policies, f.unreadable }
func (f *fake) PolicyEngines() ([]firewall.Engine, error) { return f.engines, f.unreadable }
func (f *fake) StateRule() (string, error)                { return f.stateRule, f.unreadable }
func (f *fake) SourceCheck() (string, error)              { return f.sourceCheck, f.unreadable }
func (f *fake) Marks() error                              { return f.marks }
func (f *fake) Running() (int, bool, error)               { return f.pid, f.running, f.unreadable }
func (f *fake) Sysctl(path string) (string, error) {
	if f.unreadable != nil {
		return "", f.unreadable
	}
	value, ok := f.sysctls[path]
	if !ok {
		return "", fs.ErrNotExist
	}
	return value, nil
}

// Each thing that can be wrong is told in its row, with what to do.
func TestWhatIsWrongIsTold(t *testing.T) {
	noTables := &redirect.MissingError{Mode: "steering by nftables", Feature: "nf_tables", Remedy: "load it", Err: syscall.EOPNOTSUPP}
	for _, c := range []struct {
		name    string
		change  func(*fake)
		feature string
		state   State
		found   string
		remedy  string
		chosen  string
	}{
		{"nothing", func(*fake) {}, "tproxy/nftables", Fine, "works", "", "tproxy/nftables"},
		{"no nf_tables", func(f *fake) { f.ways = map[string]error{"tproxy/nftables": noTables} }, "tproxy/nftables", Missing, "nf_tables is missing", "load it", "sklookup"},
		{"no way", func(f *fake) {
			f.ways = map[string]error{"tproxy/nftables": noTables, "sklookup": syscall.EPERM, "bind": syscall.EPERM}
		}, "bind", Missing, "operation not permitted", "", ""},
		{"no answers in the best", func(f *fake) {
			f.ways = map[string]error{"tproxy/nftables": &choose.RepliesError{Err: errors.New("lost")}}
		}, "tproxy/nftables", Warning, "works; no answers come back to clients' addresses: lost", "see the node's", "sklookup"},
		{"no answers in any", func(f *fake) {
			lost := &choose.RepliesError{Err: errors.New("lost")}
			f.ways = map[string]error{"tproxy/nftables": noTables, "sklookup": lost, "bind": lost}
		}, "bind", Warning, "works; no answers", "see the node's", "sklookup"},
		{"no veth", func(f *fake) { f.answers = syscall.EOPNOTSUPP }, "veth for trials", Missing, "operation not supported", "module veth", "tproxy/nftables"},
		{"no namespaces", func(f *fake) { f.scratch = syscall.EPERM }, "network namespaces for trials", Missing, "operation not permitted", "in place", "tproxy/nftables"},
		{"no IPv6", func(f *fake) { f.ipv6 = syscall.EAFNOSUPPORT }, "IPv6", Missing, "address family", "disable_ipv6", "tproxy/nftables"},
		{"no SCTP", func(f *fake) { f.sctp = syscall.EPROTONOSUPPORT }, "SCTP", Missing, "protocol not supported", "module sctp", "tproxy/nftables"},
		{"no kernel flows", func(f *fake) { f.flows = syscall.EPERM }, "kernel flows", Missing, "operation not permitted", "CAP_PERFMON", "tproxy/nftables"},
		{"no BPF file system", func(f *fake) { f.bpffs = errors.New("none is mounted") }, "BPF file system", Missing, "none is mounted", "mount -t bpf", "tproxy/nftables"},
		{"no CAP_BPF", func(f *fake) { f.capabilities &^= 1<<capBPF | 1<<capSysAdmin }, "CAP_BPF", Missing, "no", "grant it", "tproxy/nftables"},
		{"no CAP_PERFMON", func(f *fake) { f.capabilities &^= 1<<capPerfmon | 1<<capSysAdmin }, "CAP_PERFMON", Missing, "no", "all connections are relayed", "tproxy/nftables"},
		{"CAP_SYS_ADMIN stands for CAP_BPF", func(f *fake) { f.capabilities &^= 1 << capBPF }, "CAP_BPF", Fine, "yes", "", "tproxy/nftables"},
		{"no CAP_NET_BIND_SERVICE", func(f *fake) { f.capabilities &^= 1 << capNetBindService }, "CAP_NET_BIND_SERVICE", Missing, "no", "lower that sysctl", "tproxy/nftables"},
		{"no CAP_NET_RAW", func(f *fake) { f.capabilities &^= 1 << capNetRaw }, "CAP_NET_RAW", Missing, "no", "answers are not sent", "tproxy/nftables"},
		{"no CAP_CHOWN", func(f *fake) { f.capabilities &^= 1 << capChown }, "CAP_CHOWN", Missing, "no", "grant it", "tproxy/nftables"},
		{"ports for everybody", func(f *fake) { f.sysctls["net/ipv4/ip_unprivileged_port_start"] = "1024" }, "net.ipv4.ip_unprivileged_port_start", Fine, "1024", "", "tproxy/nftables"},
		{"few files", func(f *fake) { f.files = 1024 }, "open files", Warning, "1024, at most 1024", "ulimit", "tproxy/nftables"},
		{"no forwarding", func(f *fake) { f.sysctls["net/ipv4/ip_forward"] = "0" }, "net.ipv4.ip_forward", Warning, "0", "set it to 1", "tproxy/nftables"},
		{"no forwarding at an interface", func(f *fake) { f.unforwarded = []string{"net.ipv4.conf.eth1.forwarding is 0"} }, "forwarding for kernel flows", Warning, "eth1", "set it to 1", "tproxy/nftables"},
		{"rules for the node's own packets", func(f *fake) { f.nodeRules = "the chain INPUT" }, "kernel flows for this node's own clients", Warning, "the chain INPUT", "may be relayed", "tproxy/nftables"},
		{"strict source check", func(f *fake) { f.sysctls["net/ipv4/conf/all/rp_filter"] = "1" }, "net.ipv4.conf.all.rp_filter", Warning, "1", "set it to 2", "tproxy/nftables"},
		{"loopback for neighbours", func(f *fake) { f.sysctls["net/ipv4/conf/all/route_localnet"] = "1" }, "net.ipv4.conf.all.route_localnet", Warning, "1", "set it to 0", "tproxy/nftables"},
		{"no br_netfilter", func(f *fake) { delete(f.sysctls, "net/bridge/bridge-nf-call-iptables") }, "net.bridge.bridge-nf-call-iptables", Fine, "does not exist: no br_netfilter", "", "tproxy/nftables"},
		{"bridges past netfilter", func(f *fake) { f.sysctls["net/bridge/bridge-nf-call-iptables"] = "0" }, "net.bridge.bridge-nf-call-iptables", Warning, "0", "--reply-ports off", "tproxy/nftables"},
		{"VPN", func(f *fake) { f.checks = []string{"all", "wg0"} }, "net.ipv4.conf.*.src_valid_mark", Warning, "1 on all, wg0", "--reply-ports", "tproxy/nftables"},
		{"port range", func(*fake) {}, "net.ipv4.ip_local_port_range", Fine, "32768 60999", "", "tproxy/nftables"},
		{"kube-proxy was here", func(f *fake) { f.leftovers = []string{"the interface kube-ipvs0"} }, "leftovers of kube-proxy", Warning, "kube-ipvs0", "cleanup --kube-proxy", "tproxy/nftables"},
		{"a firewall", func(f *fake) { f.stateRule = "chain in of the nftables table fw" }, "rules about connections' state", Fine, "chain in of the nftables table fw", "", "tproxy/nftables"},
		{"firewalld", func(f *fake) { f.sourceCheck = "chain mangle_PREROUTING of the nftables table firewalld" }, "rules about packets' sources", Warning, "firewalld", "sklookup+nftables", "tproxy/nftables"},
		{"our mark", func(f *fake) { f.marks = &redirect.ClashError{What: "rule fwmark 0x2000 lookup 100"} }, "marks and routing tables", Warning, "fwmark 0x2000", "--reply-mark", "tproxy/nftables"},
		{"Calico", func(f *fake) { f.engines = []firewall.Engine{{Name: "Calico", Judges: firewall.AtInterfaces}} }, "network policy engine", Warning, "Calico", "network-policy.md", "tproxy/nftables"},
		{"network policies", func(f *fake) { f.policies = []string{"FORWARD of iptables-legacy"} }, "rules for forwarded packets", Warning, "FORWARD", "security.md", "tproxy/nftables"},
		{"a proxy runs", func(f *fake) { f.pid, f.running = 83, true }, "running sluice", Fine, "process 83", "", "tproxy/nftables"},
		{"unreadable", func(f *fake) { f.unreadable = errors.New("no proc") }, "open files", Unknown, "no proc", "", "tproxy/nftables"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := healthy()
			c.change(f)
			r := Examine(f)
			if r.Chosen != c.chosen || r.Works() != (c.chosen != "") {
				t.Errorf("chosen: %q, want %q", r.Chosen, c.chosen)
			}
			i := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.Feature == c.feature })
			if i < 0 {
				t.Fatalf("no row %q", c.feature)
			}
			got := r.Findings[i]
			if got.State != c.state || !strings.Contains(got.Found, c.found) || (got.Remedy == "") != (c.remedy == "") || !strings.Contains(got.Remedy, c.remedy) {
				t.Errorf("got %+v", got)
			}
			if got.Probed == "" || got.NeededBy == "" {
				t.Errorf("row without a reason: %+v", got)
			}
		})
	}
}

// Whatever is wrong, each feature has one row, and a healthy machine has
// nothing to do.
func TestRowsAreAlwaysTheSame(t *testing.T) {
	features := func(f *fake) (names []string) {
		for _, row := range Examine(f).Findings {
			names = append(names, row.Feature)
		}
		return names
	}
	well := features(healthy())
	check.Equalf(t, len(slices.Compact(slices.Sorted(slices.Values(well)))), len(well), "features that rows are about")
	ill := features(&fake{unreadable: syscall.EPERM, scratch: syscall.EPERM, transparent: syscall.EPERM})
	if !slices.Equal(well, ill) {
		t.Errorf("rows of an ill machine: %q\nof a healthy one: %q", ill, well)
	}
	r := Examine(healthy())
	for _, f := range r.Findings {
		if f.State != Fine || f.Remedy != "" {
			t.Errorf("a healthy machine: %+v", f)
		}
	}
}

func TestForms(t *testing.T) {
	f := healthy()
	f.sctp = syscall.EPROTONOSUPPORT
	r := Examine(f)
	var text strings.Builder
	must.OK(t, r.WriteText(&text))
	for _, want := range []string{"STATE ", "ok       tproxy/nftables ", "missing  SCTP ", "\nWhat to do:\n  SCTP: ", "\nsluice run steers by tproxy/nftables here.\n"} {
		check.Contains(t, text.String(), want)
	}
	var encoded strings.Builder
	must.OK(t, r.WriteJSON(&encoded))
	var back Report
	if err := json.Unmarshal([]byte(encoded.String()), &back); err != nil || back.Chosen != r.Chosen || !slices.Equal(back.Findings, r.Findings) {
		t.Errorf("%v: %+v, want %+v", err, back, r)
	}
	if strings.Contains(text.String(), "\t") {
		t.Error("tabs in the text")
	}
}

// TestNoLineIsLong: also on a machine that lacks all, whose reasons are long.
func TestNoLineIsLong(t *testing.T) {
	reason := errors.New(strings.Repeat("a reason of some words, ", 20))
	ill := &fake{unreadable: reason, scratch: reason, answers: reason, transparent: reason, ipv6: reason, sctp: reason, flows: reason, bpffs: reason, marks: reason}
	for _, f := range []*fake{healthy(), ill} {
		r := Examine(f)
		var text strings.Builder
		must.OK(t, r.WriteText(&text))
		for line := range strings.Lines(text.String()) {
			if n := utf8.RuneCountInString(line); n > textWidth+1 { // with its end
				t.Errorf("%d characters: %s", n, line)
			}
		}
	}
}

func TestParseCapabilities(t *testing.T) {
	for _, c := range []struct {
		status string
		want   uint64
		fails  bool
	}{
		{"Name:\tx\nCapEff:\t0000000000001400\nCapBnd:\tffff\n", 1<<capNetAdmin | 1<<capNetBindService, false},
		{"Name:\tx\n", 0, true},
		{"CapEff:\tnonsense\n", 0, true},
	} {
		if got, err := parseCapabilities(c.status); got != c.want || (err != nil) != c.fails {
			t.Errorf("%q: %#x, %v", c.status, got, err)
		}
	}
}
