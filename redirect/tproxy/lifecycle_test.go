package tproxy

import (
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/mode"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// Rules A8.1, A8.7: whatever becomes of a destination, its connections live on,
// and new ones go by the new plan at once.
func TestChangesLeaveEstablishedConnectionsAlone(t *testing.T) {
	lab := netns.NewLab(t, 1)
	first, second := steering.NewFront(t, lab.Node, "first"), steering.NewFront(t, lab.Node, "second")
	web4, web6 := tcp("10.96.0.10:80"), tcp("[fd01::10]:80")
	r := newRedirector(t, lab.Node, Options{})
	apply(t, r, planOf(steerTo(first, web4, web6)))
	var conns []*steering.Held
	hosts := []*netns.Host{lab.Client, lab.Node}
	for _, from := range hosts {
		conns = append(conns, steering.Hold(t, from, web4), steering.Hold(t, from, web6))
	}
	bystander := planOf(steerTo(second, tcp("10.96.0.20:80")))
	for _, step := range []struct {
		name string
		plan redirect.Plan
		want func(service.Destination) string
	}{
		{"another listener", planOf(steerTo(second, web4, web6)), second.Says},
		{"no endpoints", planOf(refusing(web4, web6)), func(service.Destination) string { return "refused" }},
		{"another port only", planOf(refusing(tcp("10.96.0.10:81"), tcp("[fd01::10]:81"))), func(service.Destination) string { return "refused" }},
		{"service gone", bystander, nil},
		{"back again", planOf(steerTo(second, web4, web6)), second.Says},
	} {
		apply(t, r, step.plan)
		for _, c := range conns {
			c.Works(t, step.name)
		}
		for _, from := range hosts {
			for _, d := range []service.Destination{web4, web6} {
				if step.want == nil {
					if steering.Reach(t, from, d, steering.Silence) != steering.Silence {
						t.Errorf("%s: from %s to %s: an answer, want silence", step.name, from.Name(), d)
					}
					continue
				}
				if got := steering.Reach(t, from, d, ""); got != step.want(d) {
					t.Errorf("%s: from %s: got %q, want %q", step.name, from.Name(), got, step.want(d))
				}
			}
		}
	}
	apply(t, r, bystander)
	for _, c := range conns { // the ends of connections pass too
		_ = c.Conn.(*net.TCPConn).CloseWrite()
		_ = c.SetReadDeadline(time.Now().Add(patience))
		if n, err := c.Read(make([]byte, 1)); n != 0 || err == nil || errors.Is(err, syscall.ETIMEDOUT) {
			t.Errorf("close of the connection from %s: %d bytes, %v", c.LocalAddr(), n, err)
		}
	}
}

// A new process takes over what a killed one left: to a client that connects
// all the time, nothing happens.
func TestTakesOverWhatAKilledProcessLeft(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Node.EchoTCP(t, 80) // nobody may ever reach this one by a service's address
	first, second := steering.NewFront(t, lab.Node, "first"), steering.NewFront(t, lab.Node, "second")
	web := tcp("10.96.0.10:80")
	opts := Options{Routes: route.Options{NetNS: lab.Node.FD()}}

	killed, err := New(opts)
	must.OK(t, err)
	plan := planOf(steerTo(first, web, tcp("10.97.0.1:80")), refusing(tcp("10.96.0.99:1")))
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
		apply(t, r, planOf(steerTo(second, web)))
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

	got, err := Dump(opts)
	must.OK(t, err)
	fresh := netns.NewLab(t, 0)
	again := newRedirector(t, fresh.Node, Options{})
	apply(t, again, planOf(steerTo(second, web)))
	want, err := Dump(Options{Routes: route.Options{NetNS: fresh.Node.FD()}})
	if err != nil || got != want {
		t.Errorf("%v: taken over:\n%s\nmade from nothing:\n%s", err, got, want)
	}
}

// somebodyElses puts things of others into a namespace: a table with a chain, a
// rule, a map; routes, also in the table local; a policy routing rule.
func somebodyElses(t *testing.T, n *netns.Namespace) {
	t.Helper()
	conn, err := nftables.New(nftables.WithNetNSFd(n.FD()))
	must.OK(t, err)
	table := conn.AddTable(&nftables.Table{Name: "theirs", Family: nftables.TableFamilyINet})
	set := &nftables.Set{Table: table, Name: "steer4-1", KeyType: nftables.TypeIPAddr}
	must.OK(t, conn.AddSet(set, []nftables.SetElement{{Key: []byte{10, 96, 0, 10}}}))
	chain := conn.AddChain(&nftables.Chain{Table: table, Name: "prerouting", Type: nftables.ChainTypeFilter,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw})
	conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}})
	must.OK(t, conn.Flush())
	nl := n.Netlink()
	lo, err := nl.LinkByName("lo")
	must.OK(t, err)
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
	p := planOf()
	p.Local = redirect.LocalOf(append(redirect.Ranges(p.Local), netip.MustParsePrefix("10.97.0.0/16"), netip.MustParsePrefix("10.98.7.7/32"))...)
	a4, a6 := netip.MustParseAddr("10.96.0.10"), netip.MustParseAddr("fd01::10")
	for i := range services {
		for _, a := range []netip.Addr{a4, a6} {
			steerTo(f, service.Destination{Addr: a, Port: 80, Protocol: service.TCP})(&p)
			refusing(service.Destination{Addr: a, Port: 81, Protocol: service.TCP})(&p)
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
	apply(t, r, planOf(refusing(tcp("10.96.0.10:80"))))
	if lab.Node.Dump(t) == before {
		t.Fatal("the dump shows nothing")
	}
	must.OK(t, r.Close())
	compare(t, before, lab.Node.Dump(t))
	if err := r.Apply(planOf()); !errors.Is(err, mode.ErrClosed) {
		t.Errorf("apply after close: %v", err)
	}
	if _, err := r.Verify(); !errors.Is(err, mode.ErrClosed) {
		t.Errorf("verify after close: %v", err)
	}
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
	r, err := New(opts)
	must.OK(t, err)
	apply(t, r, planOf(refusing(tcp("10.96.0.10:80"))))
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
	compare(t, before, lab.Node.Dump(t))
}

func compare(t *testing.T, before, after string) {
	t.Helper()
	if before == after {
		return
	}
	was, is := strings.Split(before, "\n"), strings.Split(after, "\n")
	for _, l := range was {
		if !slices.Contains(is, l) {
			t.Errorf("gone: %s", l)
		}
	}
	for _, l := range is {
		if !slices.Contains(was, l) {
			t.Errorf("left: %s", l)
		}
	}
}
