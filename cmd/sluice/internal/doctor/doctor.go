// Package doctor examines a machine and reports what Sluice can use of it, what
// prevents the rest, and what to do about it. It tests features where that changes
// nothing, and asks the kernel otherwise; it never looks at version numbers.
//
//	report := doctor.Examine(doctor.Host(options))
//	report.WriteText(os.Stdout)
//	if !report.Works() { ... }
package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/internal/bpffs"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/choose"
)

// State is the short answer about a feature.
type State string

// The states of a feature. What is missing may be no loss; Finding.NeededBy says
// for what it would be one.
const (
	Fine    State = "ok"
	Missing State = "missing"
	Warning State = "warning" // there, and not as it should be
	Unknown State = "unknown" // could not be looked at
)

// Finding is a row of the report.
type Finding struct {
	Feature  string `json:"feature"`
	State    State  `json:"state"`
	Found    string `json:"found"`            // in words
	Probed   string `json:"probed"`           // how it was found out
	NeededBy string `json:"neededBy"`         // what would want it
	Remedy   string `json:"remedy,omitempty"` // what to do; empty when it is fine
}

// Report is everything that was found, in an order that is always the same.
type Report struct {
	// Chosen is the steering mode that `--redirect auto` takes; empty if none
	// works.
	Chosen   string    `json:"chosen"`
	Findings []Finding `json:"findings"`
}

// Works reports whether any steering mode works.
func (r *Report) Works() bool { return r.Chosen != "" }

// Prober is what an examination asks. Host returns the real one.
type Prober interface {
	// Ways are the names of the steering modes, best first, and Try tells
	// what one of them lacks; a *choose.RepliesError is about clients' addresses
	// only.
	Ways() []string
	Try(way string) error
	// Scratch says why no network namespaces can be made for trials, and why
	// these cannot try whether answers come back to clients' addresses.
	Scratch() (namespace, answers error)
	// Capabilities are those in effect, a bit for each.
	Capabilities() (uint64, error)
	// Flows returns why the kernel cannot forward connections.
	Flows() error
	// Unforwarded returns why families are not forwarded, so that they are relayed.
	Unforwarded() ([]string, error)
	// NodeRules names a chain that judges the node's own packets, so that its own clients are relayed;
	// "" if there is none.
	NodeRules() (string, error)
	// Transparent, IPv6 and SCTP tell why there are no such sockets.
	Transparent() error
	IPv6() error
	SCTP() error
	// BPFFS returns why BPF programs cannot be pinned.
	BPFFS() error
	// Sysctl reads one by its path under /proc/sys; os.ErrNotExist if the
	// kernel does not have it.
	Sysctl(path string) (string, error)
	// SourceChecks are the interfaces whose src_valid_mark is set (F10).
	SourceChecks() ([]string, error)
	// Files and LockedMemory are limits, now and at most.
	Files() (now, most uint64, err error)
	LockedMemory() (now, most uint64, err error)
	// Leftovers are things of kube-proxy's that are in the kernel.
	Leftovers() ([]string, error)
	// ForwardPolicies are what judges packets that the node forwards.
	ForwardPolicies() ([]string, error)
	// PolicyEngines are the known network policy engines whose rules are there.
	PolicyEngines() ([]firewall.Engine, error)
	// StateRule is a rule of another program that decides by the state of connections; ""
	// if there is none.
	StateRule() (string, error)
	// SourceCheck is a rule of another program in nftables that looks up the way to packets'
	// sources; "" if there is none.
	SourceCheck() (string, error)
	// Marks tells what other program's policy routing rules are about our marks or tables.
	Marks() error
	// Running returns the process that steers here; ok is false if there is none.
	Running() (pid int, ok bool, err error)
}

// Examine looks at everything. It takes less than a second.
func Examine(p Prober) Report {
	var r Report
	without := "" // clients' addresses
	for _, name := range p.Ways() {
		f := way(p, name)
		switch {
		case f.State == Fine && r.Chosen == "":
			r.Chosen = name
		case f.State == Warning && without == "":
			without = name
		}
		r.Findings = append(r.Findings, f)
	}
	if r.Chosen == "" {
		r.Chosen = without
	}
	for _, check := range []func(Prober) []Finding{
		sockets, capabilities, limits, settings, trials, others,
	} {
		r.Findings = append(r.Findings, check(p)...)
	}
	return r
}

// purposes say what each steering mode is for.
var purposes = map[string]string{
	"sklookup/nftables": "--redirect sklookup+nftables",
	"tproxy/nftables":   "--redirect tproxy: no BPF needed",
	"tproxy/iptables":   "--redirect tproxy: no nf_tables needed",
	"sklookup":          "--redirect sklookup: no netfilter needed",
	"bind":              "--redirect bind: neither netfilter nor BPF needed",
}

func way(p Prober, name string) Finding {
	f := Finding{Feature: name, NeededBy: purposes[name], Probed: "a connection and a reply to a client's address, in temporary network namespaces"}
	switch namespace, answers := p.Scratch(); {
	case namespace != nil:
		f.Probed = "its parts, without using them"
	case answers != nil:
		f.Probed = "a connection, in a temporary network namespace"
	}
	err := p.Try(name)
	var lost *choose.RepliesError
	if errors.As(err, &lost) {
		f.State, f.Found = Warning, "works; "+lost.Error()
		f.Remedy = "nothing, if another mode returns them: Sluice takes that one; with this mode, endpoints see the node's address (source=node in the access log)"
		return f
	}
	return f.judge(err, "")
}

// judge fills in what an error means for a feature. A remedy goes before that of the
// error.
func (f Finding) judge(err error, remedy string) Finding {
	if err == nil {
		f.State, f.Found = Fine, "works"
		return f
	}
	f.State, f.Found, f.Remedy = Missing, choose.Brief(err), remedy
	var missing *redirect.MissingError
	if remedy == "" && errors.As(err, &missing) {
		f.Remedy = missing.Remedy
	}
	return f
}

// read fills in what was read, which is fine.
func (f Finding) read(text string, err error) Finding {
	f.State, f.Found = Fine, text
	if err != nil {
		f.State, f.Found = Unknown, err.Error()
	}
	return f
}

// warn fills in what had better not be there; none is said if there is nothing.
func (f Finding) warn(none string, there []string, err error, remedy string) Finding {
	if len(there) == 0 {
		return f.read(none, err)
	}
	f.State, f.Found, f.Remedy = Warning, strings.Join(there, ", "), remedy
	return f
}

func sockets(p Prober) []Finding {
	unforwarded, err := p.Unforwarded()
	rules, errRules := p.NodeRules()
	var judging []string
	if rules != "" {
		judging = append(judging, rules)
	}
	return []Finding{
		Finding{Feature: "IP_TRANSPARENT", Probed: "made a listening socket with it", NeededBy: "every steering mode"}.
			judge(p.Transparent(), ""),
		Finding{Feature: "IPv6", Probed: "made a listening socket on ::1", NeededBy: "Services with an IPv6 address"}.
			judge(p.IPv6(), "nothing, if no Service has an IPv6 address; else sysctl net.ipv6.conf.all.disable_ipv6=0 and lo.disable_ipv6=0"),
		Finding{Feature: "SCTP", Probed: "made a socket", NeededBy: "Services of the protocol SCTP: all of their clients with --datapath relay, otherwise those on the node itself"}.
			judge(p.SCTP(), "nothing, if no Service uses SCTP, or only clients whose packets the node forwards do, with kernel flows; else load the module sctp (CONFIG_IP_SCTP)"),
		Finding{Feature: "kernel flows", Probed: "loaded the BPF programs, which translated packets, and attached one to each interface", NeededBy: "--datapath auto, the default, and kernel"}.
			judge(p.Flows(), "nothing, if connections may be relayed; else a kernel with tcx (Linux 6.6) or clsact (sch_ingress, cls_bpf), CAP_BPF, CAP_NET_ADMIN, CAP_NET_RAW and CAP_PERFMON, and forwarding (net.ipv4.ip_forward=1)"),
		Finding{Feature: "forwarding for kernel flows", Probed: "read the settings of all interfaces", NeededBy: "--datapath auto and kernel: a family that the node does not forward, also at one interface alone, is relayed"}.
			warn("IPv4 and IPv6 are forwarded", unforwarded, err, "nothing, if that family may be relayed; else set it to 1: a proxy that runs notices"),
		Finding{Feature: "kernel flows for this node's own clients", Probed: "read the rules of nftables, also of iptables-nft, at the hooks that the node's own packets pass", NeededBy: "clients on the node itself, which are relayed beside rules that judge its own packets"}.
			warn("no rules judge the node's own packets", judging, errRules, "nothing, if this node's own clients may be relayed; docs/datapath.md lists which rules judge"),
		Finding{Feature: "BPF file system", Probed: "asked for the file system at --bpf-root",
			NeededBy: "sklookup: its program then refuses for a killed proxy, and rules of nftables that cost 10 % of the CPU for UDP are left out"}.
			judge(p.BPFFS(), "mount -t bpf bpf "+bpffs.DefaultRoot+"; into a container, mount that directory of its host"),
	}
}

// Numbers of capabilities (linux/capability.h).
const (
	capChown          = 0
	capNetBindService = 10
	capNetAdmin       = 12
	capNetRaw         = 13
	capSysAdmin       = 21
	capSysResource    = 24
	capPerfmon        = 38
	capBPF            = 39
)

func capabilities(p Prober) []Finding {
	set, err := p.Capabilities()
	var list []Finding
	for _, c := range []struct {
		number       uint
		name         string
		need, remedy string
	}{
		{capNetAdmin, "CAP_NET_ADMIN", "every steering mode", redirect.RemedyNetAdmin},
		{capNetBindService, "CAP_NET_BIND_SERVICE", "bind, and addresses of this node, for ports under net.ipv4.ip_unprivileged_port_start", "grant it, or lower that sysctl"},
		{capNetRaw, "CAP_NET_RAW", "UDP answers from a port that another program of the node has bound on all addresses, the programs of tproxy/iptables, and kernel flows", "grant it; without it those answers are not sent, and all connections are relayed"},
		{capChown, "CAP_CHOWN", "keeping other processes of the same user from joining UDP sockets", "grant it, or run as a separate user"},
		{capBPF, "CAP_BPF", "sklookup and kernel flows", "grant it in the initial user namespace, or use another steering mode and have connections relayed"},
		{capPerfmon, "CAP_PERFMON", "kernel flows", "grant it in the initial user namespace; without it all connections are relayed"},
		{capSysAdmin, "CAP_SYS_ADMIN", "trying steering modes in a separate namespace before one is chosen", "nothing: without it Sluice tries them in place"},
		{capSysResource, "CAP_SYS_RESOURCE", "more than 64 pipes of 1 MiB for busy streams, and BPF maps before Linux 5.11", "nothing, or raise fs.pipe-user-pages-soft"},
	} {
		f := Finding{Feature: c.name, Probed: "CapEff in /proc/thread-self/status", NeededBy: c.need}
		has := set&(1<<c.number) != 0
		if c.number == capBPF || c.number == capPerfmon {
			has = has || set&(1<<capSysAdmin) != 0 // they used to be a part of that
		}
		if f = f.read("yes", err); err == nil && !has {
			f.State, f.Found, f.Remedy = Missing, "no", c.remedy
		}
		list = append(list, f)
	}
	return list
}

// fewFiles is the limit of open files under which a node is short of them: a
// connection takes two.
const fewFiles = 20000

func limits(p Prober) []Finding {
	now, most, err := p.Files()
	files := Finding{Feature: "open files", Probed: "getrlimit", NeededBy: "two for each connection, up to two for each service port"}.
		read(fmt.Sprintf("%d, at most %d", now, most), err)
	if err == nil && most < fewFiles {
		files.State, files.Remedy = Warning, "raise it if there are many connections: ulimit -Hn, LimitNOFILE= of systemd"
	}
	now, most, err = p.LockedMemory()
	memory := Finding{Feature: "locked memory", Probed: "getrlimit", NeededBy: "sklookup before Linux 5.11"}.
		read(bytesText(now)+", at most "+bytesText(most), err)
	return []Finding{files, memory}
}

func bytesText(n uint64) string {
	const unlimited = ^uint64(0)
	switch {
	case n == unlimited:
		return "unlimited"
	case n >= 1<<20:
		return fmt.Sprintf("%d MiB", n>>20)
	}
	return fmt.Sprintf("%d KiB", n>>10)
}

// setting is a sysctl with what its values mean.
type setting struct {
	path, feature, need string
	// bad are values with which something does not work, and what to do.
	bad map[string]string
	// absent says what it means that the kernel does not have it.
	absent string
}

var theSettings = []setting{
	{"net/ipv4/ip_forward", "net.ipv4.ip_forward", "pods of this node that connect to other hosts",
		map[string]string{"0": "set it to 1 if this node has pods; Sluice itself does not need it"}, ""},
	{"net/ipv6/conf/all/forwarding", "net.ipv6.conf.all.forwarding", "the same, for IPv6",
		map[string]string{"0": "set it to 1 if this node has pods with IPv6; Sluice itself does not need it"}, "no IPv6"},
	{"net/ipv4/conf/all/rp_filter", "net.ipv4.conf.all.rp_filter", "clients with asymmetric routes",
		map[string]string{"1": "set it to 2 if replies to clients leave by another interface than the one that their packets arrive on"}, ""},
	{"net/ipv4/conf/all/route_localnet", "net.ipv4.conf.all.route_localnet", "not needed by Sluice; kube-proxy sets it for node ports on 127.0.0.1",
		map[string]string{"1": "set it to 0, also for each interface: with 1, hosts on the same link reach servers that listen only on 127.0.0.1"}, ""},
	{"net/bridge/bridge-nf-call-iptables", "net.bridge.bridge-nf-call-iptables", "pods that share a bridge: netfilter sees the packets between them",
		map[string]string{"0": "nothing for most networks; with pods on one bridge, an endpoint's reply to a client's own address may bypass this node: set --reply-ports off there"},
		"no br_netfilter"},
	{"net/ipv4/ip_local_port_range", "net.ipv4.ip_local_port_range", "connections to endpoints; --reply-ports must lie outside of it", nil, ""},
	{"net/ipv4/ip_unprivileged_port_start", "net.ipv4.ip_unprivileged_port_start", "node ports: any program may bind the ports from this one on while no proxy runs; 32768 excludes programs without CAP_NET_BIND_SERVICE", nil, ""},
}

func settings(p Prober) []Finding {
	var list []Finding
	for _, s := range theSettings {
		f := Finding{Feature: s.feature, State: Fine, Probed: "read", NeededBy: s.need}
		value, err := p.Sysctl(s.path)
		switch {
		case errors.Is(err, os.ErrNotExist):
			f.Found = "does not exist"
			if s.absent != "" {
				f.Found += ": " + s.absent
			}
		case err != nil:
			f.State, f.Found = Unknown, err.Error()
		default:
			f.Found = strings.Join(strings.Fields(value), " ")
			if remedy, bad := s.bad[f.Found]; bad {
				f.State, f.Remedy = Warning, remedy
			}
		}
		list = append(list, f)
	}
	interfaces, err := p.SourceChecks()
	marked := Finding{Feature: "net.ipv4.conf.*.src_valid_mark", Probed: "read", NeededBy: "nobody: with it, the kernel drops some replies to clients' own addresses as spoofed"}.
		warn("0", interfaces, err, "nothing, unless endpoints serve on one of --reply-ports: then choose others; VPN tools such as wg-quick set it")
	if marked.State == Warning {
		marked.Found = "1 on " + marked.Found
	}
	return append(list, marked)
}

func trials(p Prober) []Finding {
	namespace, answers := p.Scratch()
	return []Finding{
		Finding{Feature: "network namespaces for trials", Probed: "made one", NeededBy: "trying a steering mode before it is chosen"}.
			judge(namespace, "nothing: Sluice tries steering modes in place; CAP_SYS_ADMIN would allow it"),
		Finding{Feature: "veth for trials", Probed: "made a pair", NeededBy: "testing whether replies to clients' addresses come back"}.
			judge(answers, "nothing: Sluice assumes that they come back; the test needs a separate namespace and the module veth (CONFIG_VETH)"),
	}
}

// followsFrom says what follows for the data paths from how an engine judges packets;
// docs/network-policy.md has the tests.
var followsFrom = map[firewall.Judging]string{
	firewall.AtInterfaces: "with the relay, ingress policies do not hold between pods of one node, and egress policies see the Service's address; they hold for kernel flows",
	firewall.ByAddresses:  "with the relay and --conntrack bypass, servers that may open nothing cannot answer",
	firewall.Elsewhere:    "it judges packets outside of netfilter, which was not tried with Sluice",
	firewall.InUserspace:  "it judges packets in userspace, which was not tried with Sluice",
}

func others(p Prober) []Finding {
	const listed = "nftables and iptables listed"
	found, err := p.Leftovers()
	left := Finding{Feature: "leftovers of kube-proxy", Probed: "nftables, iptables and interfaces listed", NeededBy: "nobody: they take packets before Sluice does"}.
		warn("none", found, err, "stop kube-proxy, then sluice cleanup --kube-proxy")
	found, err = p.ForwardPolicies()
	forward := Finding{Feature: "rules for forwarded packets", Probed: listed, NeededBy: "nobody: clients' packets to Services do not pass them"}.
		warn("none", found, err, "if they are network policies, apply them where packets leave or reach pods: docs/security.md")
	engines, err := p.PolicyEngines()
	var names, follows []string
	for _, e := range engines {
		names, follows = append(names, e.Name), append(follows, e.Name+": "+followsFrom[e.Judges])
	}
	engine := Finding{Feature: "network policy engine", Probed: listed, NeededBy: "nobody: some of its rules do not see what Sluice relays"}.
		warn("none that is known", names, err, strings.Join(follows, "; ")+": docs/network-policy.md")
	rule, err := p.StateRule()
	state := Finding{Feature: "rules about connections' state", Probed: listed, NeededBy: "nobody: with --conntrack auto, Sluice keeps its connections in connection tracking where there are any"}.
		read(cmp.Or(rule, "none"), err)
	var checks []string
	check, err := p.SourceCheck()
	if check != "" {
		checks = []string{check}
	}
	sources := Finding{Feature: "rules about packets' sources", Probed: "nftables listed", NeededBy: "nobody: with tproxy, they drop the node's own connections to Services, which the kernel no longer knows by lo"}.
		warn("none", checks, err, "take sklookup+nftables, or have them accept iif lo before: docs/steering.md")
	marks := Finding{Feature: "marks and routing tables", Probed: "policy routing rules listed", NeededBy: "external IPs that are not the node's, and clients' addresses at endpoints"}
	if err := p.Marks(); err != nil {
		marks.State, marks.Found, marks.Remedy = Warning, err.Error(), "--steer-mark, --reply-mark, --socket-mark, --route-table-steer and --route-table-replies choose others"
	} else {
		marks = marks.read("nobody else has them", nil)
	}
	pid, ok, err := p.Running()
	who := "none"
	switch {
	case ok && pid != 0:
		who = fmt.Sprintf("process %d", pid)
	case ok:
		who = "in another PID namespace"
	}
	running := Finding{Feature: "running sluice", Probed: "tried its lock", NeededBy: "at most one in a network namespace"}.read(who, err)
	return []Finding{left, forward, engine, state, sources, marks, running}
}
