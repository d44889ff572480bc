package tproxy

import (
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// A new process takes over what a killed one left: to a client that connects
// all the time, nothing happens.
func TestTakesOverWhatAKilledProcessLeft(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Node.EchoTCP(t, 80) // nobody may ever reach this one by a service's address
	first, second := steering.NewFront(t, lab.Node, "first"), steering.NewFront(t, lab.Node, "second")
	web := tcp("10.96.0.10:80")
	opts := Options{Routes: route.Options{NetNS: lab.Node.FD()}}

	killed := must.Get(New(opts))(t)
	plan := steering.Plan(steering.Steer(first, web, tcp("10.97.0.1:80")), steering.Refuse(tcp("10.96.0.99:1")))
	plan.Local = redirect.LocalOf(append(redirect.Ranges(plan.Local), netip.MustParsePrefix("10.97.0.0/16"))...)
	apply(t, killed, plan)
	old := steering.Hold(t, lab.Client, web)
	killed.Router.Close()
	killed.filter.close()

	answers := map[string]int{}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				answers[steering.Reach(t, lab.Client, web, "")]++
			}
		}
	}()
	r := newRedirector(t, lab.Node, Options{})
	for range 20 { // each fills the table anew
		apply(t, r, steering.Plan(steering.Steer(second, web)))
		r.filter.synced = false
	}
	close(stop)
	<-done
	for a, n := range answers {
		if a != first.Says(web) && a != second.Says(web) {
			t.Errorf("%d clients got %q", n, a)
		}
	}
	old.Works(t, "after the change of process")

	got := must.Get(Dump(opts))(t)
	fresh := netns.NewLab(t, 0)
	again := newRedirector(t, fresh.Node, Options{})
	apply(t, again, steering.Plan(steering.Steer(second, web)))
	want, err := Dump(Options{Routes: route.Options{NetNS: fresh.Node.FD()}})
	if err != nil || got != want {
		t.Errorf("%v: taken over:\n%s\nmade from nothing:\n%s", err, got, want)
	}
}

// somebodyElses puts things of others into a namespace: a table with a chain, a
// rule, a map; routes, also in the table local; a policy routing rule.
func somebodyElses(t *testing.T, n *netns.Namespace) {
	t.Helper()
	conn := must.Get(nftables.New(nftables.WithNetNSFd(n.FD())))(t)
	table := conn.AddTable(&nftables.Table{Name: "theirs", Family: nftables.TableFamilyINet})
	set := &nftables.Set{Table: table, Name: "steer4-1", KeyType: nftables.TypeIPAddr}
	must.OK(t, conn.AddSet(set, []nftables.SetElement{{Key: []byte{10, 96, 0, 10}}}))
	chain := conn.AddChain(&nftables.Chain{Table: table, Name: "prerouting", Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw})
	conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}})
	must.OK(t, conn.Flush())
	nl := n.Netlink()
	lo := must.Get(nl.LinkByName("lo"))(t)
	_, local, _ := net.ParseCIDR("10.200.0.0/16")
	_, main, _ := net.ParseCIDR("10.201.0.0/16")
	rule := netlink.NewRule()
	rule.Priority, rule.Table = 83, 83
	for _, err := range []error{
		nl.RouteAdd(&netlink.Route{Table: syscall.RT_TABLE_LOCAL, Type: syscall.RTN_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: lo.Attrs().Index, Dst: local}),
		nl.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: main, Protocol: route.Protocol}),
		nl.RuleAdd(rule),
	} {
		must.OK(t, err)
	}
}

func bigPlan(f *steering.Front, services int) redirect.Plan {
	p := steering.Plan()
	p.Local = redirect.LocalOf(append(redirect.Ranges(p.Local), netip.MustParsePrefix("10.97.0.0/16"), netip.MustParsePrefix("10.98.7.7/32"))...)
	a4, a6 := netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd01::10")
	for i := range services {
		for _, a := range []netip.Addr{a4, a6} {
			steering.Steer(f, service.Destination{Addr: a, Port: 80, Protocol: service.TCP})(&p)
			steering.Refuse(service.Destination{Addr: a, Port: 81, Protocol: service.TCP})(&p)
		}
		if i%2 == 0 {
			a6 = a6.Next()
		} else {
			a4 = a4.Next()
		}
	}
	return p
}

func TestCloseLeavesTheNamespaceAsItWas(t *testing.T) {
	lab := netns.NewLab(t, 0)
	lab.Settle(t)
	somebodyElses(t, lab.Node.Namespace)
	before := lab.Node.Dump(t)
	r := newRedirector(t, lab.Node, Options{})
	apply(t, r, bigPlan(steering.NewFront(t, lab.Node, "front"), 100))
	apply(t, r, steering.Plan(steering.Refuse(tcp("10.96.0.10:80"))))
	if lab.Node.Dump(t) == before {
		t.Fatal("the dump shows nothing")
	}
	must.OK(t, r.Close())
	steering.Same(t, before, lab.Node.Dump(t))
}

func TestCleanupRemovesWhatIsOursAndNothingElse(t *testing.T) {
	lab := netns.NewLab(t, 0)
	lab.Settle(t)
	somebodyElses(t, lab.Node.Namespace)
	opts := Options{Routes: route.Options{NetNS: lab.Node.FD()}}
	before := lab.Node.Dump(t)
	if removed, err := Cleanup(opts); err != nil || len(removed) != 0 {
		t.Errorf("nothing to remove: got %v, %v", removed, err)
	}
	r := must.Get(New(opts))(t)
	apply(t, r, steering.Plan(steering.Refuse(tcp("10.96.0.10:80"))))
	r.Router.Close() // killed
	r.filter.close()
	removed, err := Cleanup(opts)
	want := []string{
		"rule fwmark 0x2000/0x2000 ipproto TCP dport 10000-29999 lookup 8377 proto 83 priority 83",
		"rule fwmark 0x2000/0x2000 ipproto UDP dport 10000-29999 lookup 8377 proto 83 priority 83",
		"rule fwmark 0x2000/0x2000 ipproto icmp lookup 8377 proto 83 priority 83",
		"rule -6 fwmark 0x2000/0x2000 ipproto TCP dport 10000-29999 lookup 8377 proto 83 priority 83",
		"rule -6 fwmark 0x2000/0x2000 ipproto UDP dport 10000-29999 lookup 8377 proto 83 priority 83",
		"rule -6 fwmark 0x2000/0x2000 ipproto ipv6-icmp lookup 8377 proto 83 priority 83",
		"route local 10.96.0.0/16 dev lo proto 83 src 10.1.0.1",
		"route local fd01::/112 dev lo proto 83 src fd00:1::1",
		"route local default dev lo table 8377 proto 83",
		"route local default dev lo table 8377 proto 83",
		"table inet sluice",
	}
	if err != nil || !slices.Equal(removed, want) {
		t.Errorf("got %q, %v, want %q", removed, err, want)
	}
	steering.Same(t, before, lab.Node.Dump(t))
}
