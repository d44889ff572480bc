package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
)

// Variant is a kind of iptables programs. The two kinds do not see each
// other's rules.
type Variant string

// The variants.
const (
	NFT    Variant = "nft"    // iptables programs that speak to nf_tables
	Legacy Variant = "legacy" // those that speak to ip_tables
)

// The features whose absence is told apart.
const (
	FeatureProgram  redirect.Feature = "iptables-restore"
	FeatureTables   redirect.Feature = "ip_tables"
	FeatureTProxy   redirect.Feature = "xt_TPROXY"
	FeatureSocket   redirect.Feature = "xt_socket"
	FeatureCT       redirect.Feature = "xt_CT"
	FeatureMark     redirect.Feature = "xt_mark"
	FeatureReject   redirect.Feature = "ipt_REJECT"
	FeatureAddrType redirect.Feature = "xt_addrtype"
)

// Mode is how errors name this mode.
const Mode = "steering by iptables"

// tools are the programs of one variant, and ipset if it can be used.
type tools struct {
	ns      *namespace
	variant Variant
	// programs are paths by their names without the variant, such as
	// "ip6tables-save".
	programs map[string]string
	ipset    string // "" without
	// noConnmark says that the kernel has no marks of connections.
	noConnmark bool
}

// installed returns the variants that the node has programs for, its default
// first, with ipset if there is one. Nothing is tried.
func installed(ns *namespace) []*tools {
	var all []*tools
	for _, infix := range []string{"", "-nft", "-legacy"} {
		t := &tools{ns: ns, programs: map[string]string{}}
		for v := range versions {
			for _, suffix := range []string{"-restore", "-save"} {
				if path := find(families[v].program + infix + suffix); path != "" {
					t.programs[families[v].program+suffix] = path
				}
			}
		}
		if t.programs["iptables-restore"] == "" || t.programs["iptables-save"] == "" {
			continue
		}
		t.variant = variantOf(ns, t.programs["iptables-save"])
		if slices.ContainsFunc(all, func(o *tools) bool { return o.variant == t.variant }) {
			continue
		}
		t.ipset = find("ipset")
		all = append(all, t)
	}
	return all
}

// rootDirs hold programs for root; an image may have none.
var rootDirs = []string{"/usr/sbin", "/sbin", "/usr/local/sbin"}

// find returns the path of a program, or "". Those for root are found even if
// PATH does not lead there.
func find(name string) string {
	if path, err := exec.LookPath(name); err == nil {
		return path
	}
	for _, dir := range rootDirs {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode()&0o111 != 0 {
			return path
		}
	}
	return ""
}

// variantOf asks a program, which says "iptables-save v1.8.9 (nf_tables)".
// Before 1.8 there was one variant, and it said nothing.
func variantOf(ns *namespace, program string) Variant {
	out, err := ns.run("", program, "-V")
	if err == nil && strings.Contains(out, "nf_tables") {
		return NFT
	}
	return Legacy
}

// known are the programs that worked when they were tried, by what was asked
// for: a kernel does not forget what it can do, and each trial is some twenty
// calls of programs.
var known struct {
	mu    sync.Mutex
	tools map[wish]tools // guarded by mu
}

type wish struct {
	variant Variant
	noSets  bool
}

// choose returns the programs to use: the first variant that works, or the one
// that was asked for.
func choose(ns *namespace, opts Options) (*tools, error) {
	known.mu.Lock()
	defer known.mu.Unlock()
	asked := wish{opts.Variant, opts.NoSets}
	if t, ok := known.tools[asked]; ok {
		t.ns = ns
		return &t, nil
	}
	t, err := try(ns, opts)
	if err != nil {
		return nil, err
	}
	if known.tools == nil {
		known.tools = map[wish]tools{}
	}
	known.tools[asked] = *t
	return t, nil
}

func try(ns *namespace, opts Options) (*tools, error) {
	var firstErr error
	for _, t := range installed(ns) {
		if opts.Variant != "" && t.variant != opts.Variant {
			continue
		}
		err := t.probe(opts)
		if err == nil {
			return t, nil
		}
		if firstErr == nil {
			firstErr = err
		}
	}
	if firstErr != nil {
		return nil, firstErr
	}
	what := "iptables-restore"
	if opts.Variant != "" {
		what = "iptables-" + string(opts.Variant) + "-restore"
	}
	return nil, &redirect.MissingError{Mode: Mode, Feature: FeatureProgram, Err: fmt.Errorf("no program %s", what),
		Remedy: "install the package iptables"}
}

// probe tries a plan that needs everything in a scratch namespace, and where
// none may be made, in the namespace itself, with no rule that leads there. Sets
// are left out if they do not work.
func (t *tools) probe(opts Options) error {
	try := *t
	var err error
	if try.ns, err = scratchNamespace(); err != nil {
		try.ns = &namespace{number: t.ns.number}
		defer try.removeProbe(opts)
	}
	defer try.ns.close()
	opts.Name = probeName
	defer func() { t.noConnmark = try.noConnmark }()
	if t.ipset != "" && !opts.NoSets && try.probeFamilies(opts, true) == nil {
		return nil
	}
	t.ipset = ""
	return try.probeFamilies(opts, false)
}

const probeName = "sluice_probe"

func (t *tools) probeFamilies(opts Options, withSets bool) error {
	want := contentsOf(samplePlan())
	want.sockets = sockets{replies: true, untracked: true}
	if withSets {
		s := newSets(t, opts.Name)
		e, err := s.compare(want)
		if err == nil {
			err = s.put(e)
		}
		if err != nil {
			return err
		}
	}
	for v := range versions {
		if !t.ns.hasFamily(v) {
			continue
		}
		if name := families[v].program + "-restore"; t.programs[name] == "" {
			return &redirect.MissingError{Mode: Mode, Feature: FeatureProgram, Err: fmt.Errorf("no program %s", name), Remedy: "install the package iptables"}
		}
		p := &tables{tools: t, v: v, name: opts.Name, opts: opts, detached: true}
		if err := p.apply(want, withSets); err != nil {
			if withSets {
				return err
			}
			return explain(err, p)
		}
		kept := *want
		kept.sockets = sockets{replies: true, kept: true}
		t.noConnmark = t.noConnmark || p.apply(&kept, withSets) != nil
	}
	return nil
}

// removeProbe takes away what was tried in a namespace that is used.
func (t *tools) removeProbe(opts Options) {
	for v := range versions {
		if t.ns.hasFamily(v) {
			_, _ = (&tables{tools: t, v: v, name: probeName, opts: opts}).remove()
		}
	}
	if t.ipset != "" {
		_, _ = newSets(t, probeName).remove()
	}
}

// samplePlan needs each kind of rule.
func samplePlan() *redirect.Plan {
	p := &redirect.Plan{}
	for _, a := range []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")} {
		for port, protocol := range []service.Protocol{service.TCP, service.UDP} {
			p.Steer = p.Steer.With(service.Destination{Addr: a, Port: 80, Protocol: protocol}, redirect.Target{Port: 1 + uint16(port)})
			p.Refuse = p.Refuse.With(service.Destination{Addr: a, Port: 81, Protocol: protocol}, struct{}{})
		}
		p.Silent = p.Silent.With(service.Destination{Addr: a, Port: 82, Protocol: service.SCTP}, struct{}{})
		p.Own = p.Own.With(service.Destination{Addr: a, Port: 83, Protocol: service.TCP}, struct{}{})
		p.NonLocal = p.NonLocal.With(a, struct{}{})
		p.ClusterIPs = p.ClusterIPs.With(a.Next(), struct{}{})
		p.Local = p.Local.With(netip.PrefixFrom(a.Next(), a.BitLen()), struct{}{})
	}
	return p
}

// explain finds out what is missing by trying one thing after the other.
func explain(err error, p *tables) error {
	if denied(err) {
		return &redirect.MissingError{Mode: Mode, Feature: redirect.FeatureNetAdmin, Err: err, Remedy: redirect.RemedyNetAdmin + "; the programs need CAP_NET_RAW too"}
	}
	for _, one := range []struct {
		feature     redirect.Feature
		table, rule string
	}{
		{FeatureTables, "filter", "-j RETURN"},
		{FeatureTables, "mangle", "-j RETURN"},
		{FeatureTables, "raw", "-j RETURN"},
		{FeatureMark, "mangle", "-j MARK --set-xmark 0x1/0x1"},
		{FeatureTProxy, "mangle", "-p tcp -j TPROXY --on-port 1"},
		{FeatureSocket, "mangle", "-p tcp " + isTransparent + " -j RETURN"},
		{FeatureCT, "raw", "-j CT --notrack"},
		{FeatureAddrType, "raw", "-m addrtype ! --src-type LOCAL -j RETURN"},
		{FeatureReject, "filter", "-p tcp -j REJECT --reject-with tcp-reset"},
	} {
		chain := chainPrefix(p.name) + "TRY"
		_, tryErr := p.restore(fmt.Sprintf("*%s\n:%s - [0:0]\n-A %s %s\nCOMMIT\n", one.table, chain, chain, one.rule))
		_, _ = p.remove()
		if tryErr != nil {
			module := p.module(one.feature)
			return &redirect.MissingError{Mode: Mode + "-" + string(p.tools.variant), Feature: redirect.Feature(module), Err: tryErr,
				Remedy: fmt.Sprintf("load the module %s, or choose another mode", module)}
		}
	}
	if errors.Is(err, exec.ErrNotFound) {
		return &redirect.MissingError{Mode: Mode, Feature: FeatureProgram, Err: err, Remedy: "install the package iptables"}
	}
	return err
}

// module returns the module that brings a feature to this family and variant.
func (t *tables) module(f redirect.Feature) string {
	switch {
	case f == FeatureTables && t.tools.variant == NFT:
		return "nf_tables"
	case f == FeatureTables && t.v == v6:
		return "ip6_tables"
	case f == FeatureReject && t.v == v6:
		return "ip6t_REJECT"
	}
	return string(f)
}
