package tproxy

import (
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// Promise 6: what somebody else removes or changes is put back, established
// connections live through it, and what others change of theirs is nothing to
// us.
func TestVerifyPutsBackWhatSomebodyChanged(t *testing.T) {
	lab := netns.NewLab(t, 0)
	f := steering.NewFront(t, lab.Node, "front")
	web4, web6 := tcp("10.96.0.10:80"), tcp("[fd01::10]:80")
	r := newRedirector(t, lab.Node, Options{})
	if repaired, err := r.Verify(); repaired || err != nil {
		t.Errorf("before the first plan: %v, %v", repaired, err)
	}
	apply(t, r, steering.Plan(steering.Steer(f, web4, web6), steering.Refuse(tcp("10.96.0.11:80"))))
	want := must.Get(Dump(r.opts))(t)
	conns := []*steering.Held{steering.Hold(t, lab.Client, web4), steering.Hold(t, lab.Client, web6), steering.Hold(t, lab.Node, web4), steering.Hold(t, lab.Node, web6)}

	conn := must.Get(nftables.New(nftables.WithNetNSFd(lab.Node.FD())))(t)
	table := &nftables.Table{Name: DefaultTable, Family: nftables.TableFamilyINet}
	nl := lab.Node.Netlink()
	const routeRemoved = "a route removed"
	for _, c := range []struct {
		name    string
		damages bool
		do      func() error
	}{
		{"nothing", false, func() error { return nil }},
		{"nft flush ruleset", true, func() error { conn.FlushRuleset(); return conn.Flush() }},
		{"nft delete table", true, func() error { conn.DelTable(table); return conn.Flush() }},
		{"nft flush table", true, func() error { conn.FlushTable(table); return conn.Flush() }},
		{"an element removed", true, func() error {
			e := &elements{}
			e.destination(steer, web4)
			if err := conn.SetDeleteElements(makeSet(table, steer, v4, r.filter.generation), e[steer][v4]); err != nil {
				return err
			}
			return conn.Flush()
		}},
		{"an element added", true, func() error {
			e := &elements{}
			e.address(cluster, netip.MustParseAddr("10.1.0.2"))
			if err := conn.SetAddElements(makeSet(table, cluster, v4, r.filter.generation), e[cluster][v4]); err != nil {
				return err
			}
			return conn.Flush()
		}},
		{"a rule added", true, func() error {
			conn.AddRule(&nftables.Rule{Table: table, Chain: &nftables.Chain{Name: chainPrerouting}, Exprs: []expr.Any{drop}})
			return conn.Flush()
		}},
		{"the table replaced by one of the same name", true, func() error {
			conn.DelTable(table)
			conn.AddTable(table)
			conn.AddChain(&nftables.Chain{Table: table, Name: chainPrerouting, Type: nftables.ChainTypeFilter,
				Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityRaw})
			return conn.Flush()
		}},
		{"somebody else's table", false, func() error {
			conn.AddTable(&nftables.Table{Name: "theirs", Family: nftables.TableFamilyINet})
			return conn.Flush()
		}},
		{routeRemoved, true, func() error {
			return removeOne(nl, netlink.Route{Table: syscall.RT_TABLE_LOCAL, Protocol: route.Protocol})
		}},
		{"somebody else's route", false, func() error {
			_, n, _ := net.ParseCIDR("10.210.0.0/16")
			return lab.Node.Netlink().RouteAdd(&netlink.Route{Table: syscall.RT_TABLE_LOCAL, Type: syscall.RTN_LOCAL,
				Scope: netlink.SCOPE_HOST, LinkIndex: kernel.Loopback, Dst: n})
		}},
	} {
		must.OKf(t, c.do(), "%s", c.name)
		if c.name != routeRemoved { // without its route, no packet arrives
			for _, o := range conns {
				o.Works(t, c.name+", before the repair")
			}
		}
		if repaired, err := r.Verify(); repaired != c.damages || err != nil {
			t.Errorf("%s: repaired %v, %v, want %v", c.name, repaired, err, c.damages)
		}
		if got, err := Dump(r.opts); err != nil || got != want {
			t.Errorf("%s: %v: after the repair:\n%s\nwant:\n%s", c.name, err, got, want)
		}
		if repaired, err := r.Verify(); repaired || err != nil {
			t.Errorf("%s: repaired again: %v, %v", c.name, repaired, err)
		}
		for _, o := range conns {
			o.Works(t, c.name)
		}
		steering.Expect(t, lab.Client, web4, f.Says(web4), c.name)
	}
}

// removeOne removes the first route of a table and protocol.
func removeOne(nl *netlink.Handle, like netlink.Route) error {
	list, err := nl.RouteListFiltered(netlink.FAMILY_V4, &like, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
	if err != nil || len(list) == 0 {
		return errors.Join(err, errors.New("no such route"))
	}
	return nl.RouteDel(&list[0])
}

// An update of a table that is no longer there is made good by filling it.
func TestApplyAfterSomebodyFlushedEverything(t *testing.T) {
	lab := netns.NewLab(t, 0)
	f := steering.NewFront(t, lab.Node, "front")
	r := newRedirector(t, lab.Node, Options{})
	apply(t, r, steering.Plan(steering.Steer(f, tcp("10.96.0.10:80"))))
	conn := must.Get(nftables.New(nftables.WithNetNSFd(lab.Node.FD())))(t)
	conn.FlushRuleset()
	must.OK(t, conn.Flush())
	apply(t, r, steering.Plan(steering.Steer(f, tcp("10.96.0.10:80"), tcp("10.96.0.11:80"))))
	for _, d := range []string{"10.96.0.10:80", "10.96.0.11:80"} {
		steering.Expect(t, lab.Client, tcp(d), f.Says(tcp(d)))
	}
}

// Fact F8: the source of the node's own connections is the address that was
// asked for, or the first global one, and follows when that changes.
func TestSourceOfTheNodesOwnConnections(t *testing.T) {
	lab := netns.NewLab(t, 0)
	web := tcp("10.96.0.10:80")
	f := steering.NewFront(t, lab.Node, "front")
	source := func() string {
		c := steering.Hold(t, lab.Node, web)
		return netip.MustParseAddrPort(c.LocalAddr().String()).Addr().String()
	}
	r := newRedirector(t, lab.Node, Options{})
	apply(t, r, steering.Plan(steering.Steer(f, web)))
	check.Equalf(t, source(), "10.1.0.1", "the source, which is the first global address")
	must.OK(t, lab.Node.AddAddr("client", netip.MustParsePrefix("10.5.0.1/24")))
	link := must.Get(lab.Node.Netlink().LinkByName("client"))(t)
	addr := must.Get(netlink.ParseAddr("10.1.0.1/24"))(t)
	must.OK(t, lab.Node.Netlink().AddrDel(link, addr))
	if repaired, err := r.Verify(); repaired || err != nil { // nobody changed anything of ours
		t.Errorf("the address is gone: repaired %v, %v", repaired, err)
	}
	check.Equalf(t, source(), "10.5.0.1", "the source, which is the address that is left")
	must.OK(t, r.Close())
	must.OK(t, lab.Node.AddAddr("lo", netip.MustParsePrefix("10.0.0.1/32")))
	asked := newRedirector(t, lab.Node, Options{Routes: route.Options{NodeIPs: []netip.Addr{netip.MustParseAddr("10.0.0.1")}}})
	apply(t, asked, steering.Plan(steering.Steer(f, web)))
	check.Equalf(t, source(), "10.0.0.1", "the source, which was asked for")
	wrong := Options{Routes: route.Options{NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}}, Table: "wrong"}
	check.ErrorIsf(t, newRedirector(t, lab.Node, wrong).Apply(steering.Plan()), syscall.EINVAL, "an address that the node does not have")
}

// Connection tracking sees nothing of what is steered, refused or dropped,
// from another host and from the node itself, while it sees the rest.
func TestConntrackSeesNothing(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	tracked := func() (list []string) {
		for _, family := range []netlink.InetFamily{netlink.FAMILY_V4, netlink.FAMILY_V6} {
			flows := must.Get(lab.Node.Netlink().ConntrackTableList(netlink.ConntrackTable, family))(t)
			for _, flow := range flows {
				if (flow.Forward.Protocol == unix.IPPROTO_TCP || flow.Forward.Protocol == unix.IPPROTO_UDP) && !flow.Forward.SrcIP.IsLoopback() {
					list = append(list, flow.String())
				}
			}
		}
		return list
	}
	lab.Node.TrackConnections(t)
	f := steering.NewFront(t, lab.Node, "front")
	r := newRedirector(t, lab.Node, Options{})
	with := steering.Plan(steering.Steer(f, tcp("10.96.0.10:80"), tcp("[fd01::10]:80")), steering.Refuse(tcp("10.96.0.11:80"), udp("10.96.0.11:53")))
	apply(t, r, with)
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, d := range []string{"10.96.0.10:80", "[fd01::10]:80", "10.96.0.11:80", "10.96.0.10:81"} {
			steering.Reach(t, from, tcp(d), "")
		}
		askUDP(t, from, "10.96.0.11:53")
		steering.Reach(t, from, tcp("10.96.0.99:80"), steering.Silence)
		outlives := steering.Hold(t, from, tcp("10.96.0.10:80"))
		apply(t, r, steering.Plan())
		outlives.Works(t, "service gone")
		apply(t, r, with)
	}
	if list := tracked(); len(list) != 0 {
		t.Errorf("tracked: %q", list)
	}
	steering.Expect(t, lab.Client, tcp("10.2.1.2:8080"), "b1:8080")
	if list := tracked(); len(list) != 1 {
		t.Errorf("a connection that is not ours: tracked %q, want one", list)
	}
}

// Without CAP_NET_ADMIN the error says so.
func TestWithoutCapability(t *testing.T) {
	ns := netns.New(t, "node")
	var missing *redirect.MissingError
	err := withoutNetAdmin(ns, func() error {
		r, err := New(Options{})
		if err == nil {
			_ = r.Close()
		}
		return err
	})
	if !errors.As(err, &missing) || missing.Feature != redirect.FeatureNetAdmin {
		t.Errorf("New: got %v, want the capability named", err)
	}
	err = withoutNetAdmin(ns, func() error {
		_, err := Cleanup(Options{})
		return err
	})
	if err != nil && (!errors.As(err, &missing) || missing.Feature != redirect.FeatureNetAdmin) {
		t.Errorf("Cleanup: got %v, want the capability named", err)
	}
}

// withoutNetAdmin runs f in the namespace on a thread that has every
// capability but CAP_NET_ADMIN.
func withoutNetAdmin(ns *netns.Namespace, f func() error) error {
	return ns.Do(func() error {
		header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var all, fewer [2]unix.CapUserData
		if err := unix.Capget(&header, &all[0]); err != nil {
			return err
		}
		fewer = all
		fewer[0].Effective &^= 1 << unix.CAP_NET_ADMIN
		if err := unix.Capset(&header, &fewer[0]); err != nil {
			return err
		}
		err := f()
		return errors.Join(err, unix.Capset(&header, &all[0]))
	})
}

// Promise 6: whatever of ours somebody flushes is noticed and back within a
// second, once, and established connections live through it: to cluster IPs, to
// addresses that are not ours, and with a client's own address. (A packet that
// one of this node's clients sends in that moment to an address that is not ours
// leaves the node; whether its owner answers with a reset is up to him.)
func TestFlushIsNoticed(t *testing.T) {
	lab := netns.NewLab(t, 1)
	elsewhere(t, lab, "192.0.2.10")
	lab.Backends[0].EchoTCP(t, 8080)
	f := steering.NewFront(t, lab.Node, "front")
	web, out := tcp("10.96.0.10:80"), tcp("192.0.2.10:80")
	r := newRedirector(t, lab.Node, Options{})
	apply(t, r, steering.Plan(steering.Steer(f, web, out)))
	want := must.Get(Dump(r.opts))(t)
	upstream := must.Get(dialAs(lab.Node, "tcp", netip.AddrPortFrom(lab.Client.IPv4, 10001), "10.2.1.2:8080"))(t)
	kept := steering.Keep(t, upstream, "client", tcp("10.2.1.2:8080"))
	conns := []*steering.Held{kept, steering.Hold(t, lab.Client, web), steering.Hold(t, lab.Node, web), steering.Hold(t, lab.Client, out)}
	conn := must.Get(nftables.New(nftables.WithNetNSFd(lab.Node.FD())))(t)
	nl := lab.Node.Netlink()
	flushTable := func(table int) func() error {
		return func() error {
			for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
				list, err := nl.RouteListFiltered(family, &netlink.Route{Table: table, Protocol: route.Protocol}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_PROTOCOL)
				if err != nil && !errors.Is(err, syscall.ENOENT) {
					return err
				}
				for _, k := range list {
					if err := nl.RouteDel(&k); err != nil {
						return err
					}
				}
			}
			return nil
		}
	}
	for _, c := range []struct {
		name string
		do   func() error
	}{
		{"nft flush ruleset", func() error { conn.FlushRuleset(); return conn.Flush() }},
		{"ip rule flush", func() error {
			for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
				rules, err := nl.RuleList(family)
				if err != nil {
					return err
				}
				for _, k := range rules {
					if k.Priority != 0 && k.Priority < 32766 { // ip leaves those, too
						if err := nl.RuleDel(&k); err != nil {
							return err
						}
					}
				}
			}
			return nil
		}},
		{"ip route flush table 8376", flushTable(8376)},
		{"ip route flush table 8377", flushTable(8377)},
		{"ip route flush table local proto 83", flushTable(syscall.RT_TABLE_LOCAL)},
	} {
		for len(r.Changed()) > 0 {
			<-r.Changed()
		}
		must.OKf(t, c.do(), "%s", c.name)
		repairs, begin := 0, time.Now()
		for repairs == 0 {
			select {
			case <-r.Changed():
			case <-time.After(patience):
				t.Fatalf("%s: not noticed", c.name)
			}
			repaired, err := r.Verify()
			must.OKf(t, err, "%s", c.name)
			if repaired {
				repairs++
			}
		}
		t.Logf("%s: repaired after %v", c.name, time.Since(begin))
		if repaired, err := r.Verify(); repaired || err != nil {
			t.Errorf("%s: repaired again: %v, %v", c.name, repaired, err)
		}
		if got, err := Dump(r.opts); err != nil || got != want {
			t.Errorf("%s: %v: after the repair:\n%s\nwant:\n%s", c.name, err, got, want)
		}
		for _, o := range conns {
			o.Works(t, c.name)
		}
	}
}
