package iptables

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// somebodyElses puts rules and a set of others into a namespace, rules at the
// heads of chains among them.
func somebodyElses(t *testing.T, n *netns.Namespace, variant Variant) {
	t.Helper()
	program(t, n, "ipset", "create", "theirs", "hash:ip")
	program(t, n, "ipset", "add", "theirs", "192.0.2.7")
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, args := range []string{
			"-t mangle -N SLUICE", // not one of ours
			"-t mangle -A SLUICE -j RETURN",
			"-t mangle -A PREROUTING -p sctp -j SLUICE", // nothing that counts packets here
			"-t filter -A INPUT -p sctp -j ACCEPT",
			"-t filter -A FORWARD -p sctp -m comment --comment SLUICE-REST -j ACCEPT",
		} {
			program(t, n, family+"-"+string(variant), strings.Fields(args)...)
		}
	}
}

// Promise 6: what somebody else removes or changes is put back, established
// connections live through it, and what others change of theirs is nothing to
// us.
func TestVerifyPutsBackWhatSomebodyChanged(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		lab := netns.NewLab(t, 0)
		node := lab.Node.Namespace
		somebodyElses(t, node, opts.Variant)
		f := steering.NewFront(t, lab.Node, "front")
		web := []service.Destination{tcp("10.96.0.10:80"), tcp("[fd01::10]:80")}
		r := newOne(t, lab.Node, opts)
		if repaired, err := r.Verify(); repaired || err != nil {
			t.Errorf("before the first plan: %v, %v", repaired, err)
		}
		apply(t, r, steering.Plan(steering.Steer(f, web...), steering.Refuse(tcp("10.96.0.11:80"))))
		var conns []*steering.Held
		for _, d := range web {
			conns = append(conns, steering.Hold(t, lab.Client, d), steering.Hold(t, lab.Node, d))
		}
		ipt := "iptables-" + string(opts.Variant)
		listener := setName(DefaultName, listener{service.TCP, f.Target(web[0]).Port}.list(), v4)
		for _, c := range []struct {
			name    string
			damages bool
			sets    bool // is possible with sets only
			do      []string
		}{
			{"nothing", false, false, nil},
			{"iptables -F", true, false, []string{ipt + " -F"}},
			{"iptables -t mangle -F", true, false, []string{ipt + " -t mangle -F"}},
			{"ip6tables -t raw -F", true, false, []string{"ip6" + ipt[2:] + " -t raw -F"}},
			{"a chain of ours flushed", true, false, []string{ipt + " -t mangle -F SLUICE-LANES"}},
			{"a rule in a chain of ours", true, false, []string{ipt + " -I SLUICE-REST -j ACCEPT"}},
			{"our rule at the head removed", true, false, []string{ipt + " -t raw -D PREROUTING 1"}},
			{"everything of ours removed", true, false, []string{ipt + " -t mangle -F", ipt + " -t mangle -X"}},
			{"somebody before us", true, false, []string{ipt + " -t mangle -I PREROUTING -p icmp -j ACCEPT"}},
			{"somebody after us", false, false, []string{ipt + " -t mangle -A PREROUTING -p icmp -j ACCEPT"}},
			{"a set flushed", true, true, []string{"ipset flush " + listener}},
			{"an element removed", true, true, []string{"ipset del sluice-local-6 fd01::/112"}},
			{"an element added", true, true, []string{"ipset add sluice-cluster-4 10.96.0.77"}},
			{"somebody else's set", false, true, []string{"ipset add theirs 192.0.2.8"}},
		} {
			if c.sets && opts.NoSets {
				continue
			}
			for _, line := range c.do {
				words := strings.Fields(line)
				program(t, node, words[0], words[1:]...)
			}
			for _, o := range conns {
				o.Works(t, c.name+", before the repair")
			}
			if repaired, err := r.Verify(); repaired != c.damages || err != nil {
				t.Errorf("%s: repaired %v, %v, want %v", c.name, repaired, err, c.damages)
			}
			if repaired, err := r.Verify(); repaired || err != nil {
				t.Errorf("%s: repaired again: %v, %v", c.name, repaired, err)
			}
			for _, o := range conns {
				o.Works(t, c.name)
			}
			for _, d := range web {
				steering.Expect(t, lab.Client, d, f.Says(d), c.name)
			}
			steering.Expect(t, lab.Client, tcp("10.96.0.11:80"), "refused", c.name)
		}
	})
}

// What somebody flushes is noticed; what he changes of his own
// in tables that are not ours is not.
func TestNoticesAtOnce(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		lab := netns.NewLab(t, 0)
		lab.Settle(t)
		r := newOne(t, lab.Node, opts)
		apply(t, r, steering.Plan())
		quiet := func() {
			for {
				select {
				case <-r.Changed():
				case <-time.After(2 * pollPeriod):
					return
				}
			}
		}
		ipt := "iptables-" + string(opts.Variant)
		for _, c := range []struct {
			notices bool
			do      []string
		}{
			{true, []string{ipt, "-F"}},
			{true, []string{"ip6" + ipt[2:], "-t", "mangle", "-F"}},
			{true, []string{"ip", "rule", "flush", "protocol", "83"}},
			{true, []string{"ip", "route", "flush", "table", "local", "proto", "83"}},
			{false, []string{ipt, "-t", "nat", "-N", "THEIRS"}},
		} {
			do := func() (noticed bool) {
				quiet()
				program(t, lab.Node.Namespace, c.do[0], c.do[1:]...)
				wait := 3 * pollPeriod
				if c.notices {
					wait = longest
				}
				select {
				case <-r.Changed():
					return true
				case <-time.After(wait):
					return false
				}
			}
			noticed := do()
			for try := 0; noticed && !c.notices && try < 2; try++ {
				// It may have been the step before, late: that is told once.
				program(t, lab.Node.Namespace, ipt, "-t", "nat", "-X", "THEIRS")
				noticed = do()
			}
			check.Equalf(t, noticed, c.notices, "%s: noticed", strings.Join(c.do, " "))
			if repaired, err := r.Verify(); repaired != c.notices || err != nil {
				t.Errorf("%s: repaired %v, %v, want %v", strings.Join(c.do, " "), repaired, err, c.notices)
			}
		}
	})
}

// Somebody who insists on the head of a chain is not fought with.
func TestHeadOfAChainIsNotFoughtFor(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		lab := netns.NewLab(t, 0)
		r := newOne(t, lab.Node, opts)
		apply(t, r, steering.Plan())
		for i, want := range []bool{true, false, false} {
			program(t, lab.Node.Namespace, "iptables-"+string(opts.Variant), "-I", "INPUT", "-p", "icmp", "-j", "ACCEPT")
			if repaired, err := r.Verify(); repaired != want || err != nil {
				t.Errorf("time %d: repaired %v, %v, want %v", i, repaired, err, want)
			}
		}
	})
}

// An update of what is no longer there is made good at once.
func TestApplyAfterSomebodyFlushedEverything(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		lab := netns.NewLab(t, 0)
		f := steering.NewFront(t, lab.Node, "front")
		r := newOne(t, lab.Node, opts)
		web := tcp("10.96.0.10:80")
		apply(t, r, steering.Plan(steering.Steer(f, web)))
		for _, table := range tableNames {
			program(t, lab.Node.Namespace, "iptables-"+string(opts.Variant), "-t", table, "-F")
			program(t, lab.Node.Namespace, "iptables-"+string(opts.Variant), "-t", table, "-X")
		}
		if !opts.NoSets {
			for p := range r.sets.sizes {
				if p.version == v4 {
					program(t, lab.Node.Namespace, "ipset", "destroy", setName(DefaultName, p.list, p.version))
				}
			}
		}
		again := steering.Plan(steering.Steer(f, web, tcp("10.96.0.11:80")), steering.Refuse(tcp("10.96.0.12:80")))
		if err := r.Apply(again); err != nil {
			t.Logf("the first try: %v", err)
			apply(t, r, again)
		}
		must.OK(t, must.Err(r.Verify()))
		for _, d := range []string{"10.96.0.10:80", "10.96.0.11:80"} {
			steering.Expect(t, lab.Client, tcp(d), f.Says(tcp(d)))
		}
	})
}

func TestCloseLeavesTheNamespaceAsItWas(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		for _, name := range []string{"empty", "in use"} {
			t.Run(name, func(t *testing.T) {
				lab := netns.NewLab(t, 0)
				lab.Settle(t)
				if name == "in use" {
					somebodyElses(t, lab.Node.Namespace, opts.Variant)
				}
				before := dump(t, lab.Node.Namespace)
				r := newOne(t, lab.Node, opts)
				check.Equalf(t, dump(t, lab.Node.Namespace), before, "New changed something")
				f := steering.NewFront(t, lab.Node, "front")
				apply(t, r, steering.Plan(steering.Steer(f, tcp("10.96.0.10:80"), udp("[fd01::10]:53"), tcp("192.0.2.1:80")), steering.Refuse(udp("192.0.2.1:80"))))
				apply(t, r, steering.Plan(steering.Refuse(tcp("10.96.0.10:80")), steering.Linger(tcp("192.0.2.1:80"))))
				if dump(t, lab.Node.Namespace) == before {
					t.Fatal("the dump shows nothing")
				}
				must.OK(t, r.Close())
				steering.Same(t, before, dump(t, lab.Node.Namespace))
			})
		}
	})
}

// What a killed process left is taken over, or cleaned up, whichever.
func TestAfterAKilledProcess(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		lab := netns.NewLab(t, 0)
		lab.Settle(t)
		node := lab.Node.Namespace
		somebodyElses(t, node, opts.Variant)
		opts.Routes.NetNS = lab.Node.FD()
		before := dump(t, node)
		if removed, err := Cleanup(opts); err != nil || len(removed) != 0 {
			t.Errorf("nothing to remove: got %v, %v", removed, err)
		}
		first, second := steering.NewFront(t, lab.Node, "first"), steering.NewFront(t, lab.Node, "second")
		web := tcp("10.96.0.10:80")
		// Both plans need rules at the same built-in chains: those that were made
		// for the first stay, though empty.
		out := tcp("192.0.2.1:80")
		plan := steering.Plan(steering.Steer(first, web, out), steering.Refuse(tcp("10.96.0.99:1")))
		plan.Local = redirect.LocalOf(append(redirect.Ranges(plan.Local), netip.MustParsePrefix("10.97.0.0/16"))...)
		for _, end := range []string{"taken over", "cleaned up"} {
			killed := must.Get(New(opts))(t)
			apply(t, killed, plan)
			old := steering.Hold(t, lab.Client, web)
			killed.Router.Close()
			if end == "cleaned up" {
				removed, err := Cleanup(opts)
				if err != nil || !slices.ContainsFunc(removed, func(l string) bool { return strings.Contains(l, "SLUICE-LANES") }) {
					t.Errorf("removed %q, %v", removed, err)
				}
				steering.Same(t, before, dump(t, node))
				continue
			}
			r := newOne(t, lab.Node, opts)
			apply(t, r, steering.Plan(steering.Steer(second, web, out)))
			old.Works(t, end)
			steering.Expect(t, lab.Client, web, second.Says(web))
			fresh := netns.NewLab(t, 0)
			somebodyElses(t, fresh.Node.Namespace, opts.Variant)
			apply(t, newOne(t, fresh.Node, Options{Variant: opts.Variant, NoSets: opts.NoSets}), steering.Plan(steering.Steer(second, web, out)))
			for _, p := range []string{"iptables-" + string(opts.Variant) + "-save", "ip6tables-" + string(opts.Variant) + "-save"} {
				steering.Same(t, withoutCounters(program(t, fresh.Node.Namespace, p)), withoutCounters(program(t, node, p)))
			}
			must.OK(t, r.Close())
			steering.Same(t, before, dump(t, node))
		}
	})
}

func TestPlansAndOptionsThatCannotBe(t *testing.T) {
	lab := netns.NewLab(t, 0)
	r := newOne(t, lab.Node, Options{})
	for _, c := range []struct {
		plan redirect.Plan
		want string
	}{
		{steering.Plan(steering.Steer(steering.NewFront(t, lab.Node, "front"), steering.At("10.96.0.10:80", service.SCTP))), "TPROXY carries TCP and UDP only"},
		{redirect.Plan{Local: redirect.LocalOf(netip.MustParsePrefix("10.0.0.0/8"))}, "this node's own address 10.1.0.1"},
		{redirect.Plan{Local: redirect.LocalOf(netip.MustParsePrefix("0.0.0.0/0"))}, "it holds every address"},
	} {
		check.Error(t, r.Apply(c.plan), c.want)
	}
	for _, o := range []Options{{Name: "two words"}, {Name: strings.Repeat("x", 13)}, {Variant: "ebtables"}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v: no error", o)
		}
	}
}
