package route

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	vnetns "github.com/vishvananda/netns"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

func prefixes(s string) (ps []netip.Prefix) {
	for _, f := range strings.Fields(s) {
		ps = append(ps, netip.MustParsePrefix(f))
	}
	return ps
}

func addrs(s string) (as []netip.Addr) {
	for _, f := range strings.Fields(s) {
		as = append(as, netip.MustParseAddr(f))
	}
	return as
}

func destination(s string, p service.Protocol) service.Destination {
	ap := netip.MustParseAddrPort(s)
	return service.Destination{Addr: ap.Addr(), Port: ap.Port(), Protocol: p}
}

// whole is a state that has some of everything.
func whole() State {
	return State{
		Local:       redirect.LocalOf(prefixes("10.96.0.0/16 10.96.3.0/24 fd01::/112")...),
		NonLocal:    redirect.SetOf(addrs("192.0.2.7 2001:db8::7")...),
		MarkSteers:  true,
		PortRules:   redirect.SetOf(destination("192.0.2.7:80", service.TCP), destination("[2001:db8::7]:53", service.UDP)),
		MarkReplies: true,
		ReplyPorts:  redirect.ReplyPorts,
	}
}

const wholeText = `route local 10.96.0.0/16 dev lo proto 83 src 10.1.0.1
route local fd01::/112 dev lo proto 83 src fd00:1::1
route local 192.0.2.7/32 dev lo table 8376 proto 83 src 10.1.0.1
route local 2001:db8::7/128 dev lo table 8376 proto 83 src fd00:1::1
route local default dev lo table 8377 proto 83
route local default dev lo table 8377 proto 83
rule fwmark 0x1000/0x1000 lookup 8376 proto 83 priority 83
rule fwmark 0x2000/0x2000 ipproto TCP dport 10000-29999 lookup 8377 proto 83 priority 83
rule fwmark 0x2000/0x2000 ipproto UDP dport 10000-29999 lookup 8377 proto 83 priority 83
rule fwmark 0x2000/0x2000 ipproto icmp lookup 8377 proto 83 priority 83
rule to 192.0.2.7 ipproto TCP dport 80 lookup 8376 proto 83 priority 83
rule -6 fwmark 0x1000/0x1000 lookup 8376 proto 83 priority 83
rule -6 fwmark 0x2000/0x2000 ipproto TCP dport 10000-29999 lookup 8377 proto 83 priority 83
rule -6 fwmark 0x2000/0x2000 ipproto UDP dport 10000-29999 lookup 8377 proto 83 priority 83
rule -6 fwmark 0x2000/0x2000 ipproto ipv6-icmp lookup 8377 proto 83 priority 83
rule -6 to 2001:db8::7 ipproto UDP dport 53 lookup 8376 proto 83 priority 83`

func open(t *testing.T, n *netns.Host, o Options) *Router {
	t.Helper()
	o.NetNS = n.FD()
	r := must.Get(Open(o))(t)
	t.Cleanup(r.Close)
	return r
}

func apply(t *testing.T, r *Router, s State, wantChange bool) {
	t.Helper()
	if changed, err := r.Apply(s); err != nil || changed != wantChange {
		t.Fatalf("apply: changed %v, %v, want a change: %v", changed, err, wantChange)
	}
}

func dump(t *testing.T, r *Router) string {
	t.Helper()
	lines := must.Get(r.Dump())(t)
	return strings.Join(lines, "\n")
}

// somebodyElses puts routes and rules of others next to ours.
func somebodyElses(t *testing.T, n *netns.Host) {
	t.Helper()
	nl := n.Netlink()
	lo := must.Get(nl.LinkByName("lo"))(t)
	_, local, _ := net.ParseCIDR("10.200.0.0/16")
	_, main, _ := net.ParseCIDR("10.201.0.0/16")
	same := netlink.NewRule() // ours in number only
	same.Priority, same.Table = DefaultRulePriority, 83
	marked := netlink.NewRule()
	mask := uint32(0xf00)
	marked.Priority, marked.Table, marked.Mark, marked.Mask, marked.Protocol = 9, 2004, 0x200, &mask, Protocol
	for _, err := range []error{
		nl.RouteAdd(&netlink.Route{Table: syscall.RT_TABLE_LOCAL, Type: syscall.RTN_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: lo.Attrs().Index, Dst: local}),
		nl.RouteAdd(&netlink.Route{LinkIndex: lo.Attrs().Index, Dst: main, Protocol: Protocol}),
		nl.RuleAdd(same),
		nl.RuleAdd(marked),
	} {
		must.OK(t, err)
	}
}

func TestRemoveLeavesTheNamespaceAsItWas(t *testing.T) {
	lab := netns.NewLab(t, 0)
	lab.Settle(t)
	somebodyElses(t, lab.Node)
	before := lab.Node.Dump(t)
	r := open(t, lab.Node, Options{})
	check.OKf(t, r.Check(whole()), "check")
	if removed, err := r.Remove(); err != nil || len(removed) != 0 {
		t.Errorf("nothing to remove: %q, %v", removed, err)
	}
	apply(t, r, whole(), true)
	apply(t, r, whole(), false)
	check.Textf(t, dump(t, r), wholeText, "in force")
	removed, err := r.Remove()
	if slices.Sort(removed); err != nil || !slices.Equal(removed, sorted(wholeText)) {
		t.Errorf("%v: removed:\n%s\nwant:\n%s", err, strings.Join(removed, "\n"), wholeText)
	}
	check.Textf(t, lab.Node.Dump(t), before, "left behind")
}

func sorted(text string) []string {
	lines := strings.Split(text, "\n")
	slices.Sort(lines)
	return lines
}

// Whatever state comes after whatever other, and whatever somebody removed in
// between, the tables are those of the last state, as made from nothing.
func TestAnyStateAfterAnyOther(t *testing.T) {
	lab := netns.NewLab(t, 0)
	r := open(t, lab.Node, Options{})
	rnd := rand.New(rand.NewPCG(2, 3))
	state := func() (s State) {
		for _, p := range prefixes("10.96.0.0/16 10.96.0.0/24 10.96.1.0/24 10.97.0.1/32 fd01::/112 fd01::5/128") {
			if rnd.IntN(2) == 0 {
				s.Local = redirect.LocalOf(append(redirect.Ranges(s.Local), p)...)
			}
		}
		for _, a := range addrs("192.0.2.1 192.0.2.2 2001:db8::1") {
			if rnd.IntN(2) == 0 {
				s.NonLocal = s.NonLocal.With(a, struct{}{})
				s.PortRules = s.PortRules.With(service.Destination{Addr: a, Port: uint16(80 + rnd.IntN(2)), Protocol: service.Protocol(1 + rnd.IntN(3))}, struct{}{})
			}
		}
		s.MarkSteers, s.MarkReplies = rnd.IntN(2) == 0, rnd.IntN(2) == 0
		if rnd.IntN(2) == 0 {
			s.ReplyPorts = [2]uint16{61000, 65534}
		}
		return s
	}
	var last State
	for i := range 120 {
		s := state()
		var err error
		switch {
		case i == 0:
			_, err = r.Apply(s)
		case i%3 == 0: // only this is different: it need not read the tables
			s.MarkSteers, s.MarkReplies, s.ReplyPorts = last.MarkSteers, last.MarkReplies, last.ReplyPorts
			err = r.Put(s)
		case i%3 == 1: // what is new is there already, or what is old is gone
			if _, err = r.Apply(s); err == nil {
				r.want = &last
				err = r.Put(s)
			}
		default:
			err = r.Put(s)
		}
		must.OKf(t, err, "state %d", i)
		last = s
		got := dump(t, r)
		if changed, err := r.Apply(s); err != nil || changed {
			t.Fatalf("state %d: again: changed %v, %v", i, changed, err)
		}
		must.OK(t, must.Err(r.Remove()))
		if err := r.Put(s); err != nil { // although it is the same as before
			t.Fatal(err)
		}
		if fresh := dump(t, r); got != fresh {
			t.Fatalf("state %d: in force:\n%s\nmade from nothing:\n%s", i, got, fresh)
		}
	}
}

// A range that grows or shrinks is routed at every moment: what is new comes
// before what is old goes.
func TestAddsBeforeItRemoves(t *testing.T) {
	lab := netns.NewLab(t, 0)
	lab.Settle(t) // the kernel's own routes have come
	r := open(t, lab.Node, Options{})
	apply(t, r, State{Local: redirect.LocalOf(prefixes("10.96.0.0/24")...), NonLocal: redirect.SetOf(addrs("192.0.2.1")...), MarkSteers: true}, true)

	updates, done := make(chan netlink.RouteUpdate, 100), make(chan struct{})
	defer close(done)
	handle := vnetns.NsHandle(lab.Node.FD())
	must.OK(t, netlink.RouteSubscribeWithOptions(updates, done, netlink.RouteSubscribeOptions{Namespace: &handle}))
	apply(t, r, State{Local: redirect.LocalOf(prefixes("10.96.0.0/23")...), NonLocal: redirect.SetOf(addrs("192.0.2.2")...), MarkSteers: true}, true)
	var order []string
	for len(order) < 4 {
		u := <-updates
		verb := "add "
		if u.Type == syscall.RTM_DELROUTE {
			verb = "del "
		}
		order = append(order, verb+u.Dst.String())
	}
	check.EqualSlices(t, order, []string{"add 10.96.0.0/23", "add 192.0.2.2/32", "del 10.96.0.0/24", "del 192.0.2.1/32"})
}

// TestTablesAreSplitBeforeServicesAreServed: the first rule of a namespace makes
// local addresses unreachable for a moment, which must not be when a connection
// first needs a rule. The kernel shows tables that it keeps in one as the same.
func TestTablesAreSplitBeforeServicesAreServed(t *testing.T) {
	lab := netns.NewLab(t, 0)
	merged := func() bool {
		t.Helper()
		var text []byte
		must.OK(t, lab.Node.Do(func() (err error) {
			text, err = os.ReadFile("/proc/thread-self/net/fib_trie")
			return err
		}))
		main, local, found := strings.Cut(string(text), "Local:\n")
		if !found || !strings.Contains(local, "host LOCAL") {
			t.Fatalf("not as expected:\n%s", text)
		}
		return strings.Contains(main, "host LOCAL")
	}
	if !merged() {
		t.Fatal("this kernel keeps the tables of a new namespace apart: the test proves nothing")
	}
	r := open(t, lab.Node, Options{})
	apply(t, r, State{Local: redirect.LocalOf(prefixes("10.96.0.0/16")...)}, true)
	if merged() {
		t.Error("the tables are in one while a Service's address is local")
	}
	check.Textf(t, dump(t, r), "route local 10.96.0.0/16 dev lo proto 83 src 10.1.0.1", "in force")
}

// TestPortRulesAreAddedInOrder: the kernel keeps rules of one priority in the
// order in which they were added, which is by address, port and protocol.
func TestPortRulesAreAddedInOrder(t *testing.T) {
	lab := netns.NewLab(t, 0)
	r := open(t, lab.Node, Options{})
	var ports []service.Destination
	var want []string
	for i := range 4 {
		a := netip.AddrFrom4([4]byte{192, 0, 2, byte(i)})
		for _, port := range []uint16{53, 80} {
			for _, p := range []service.Protocol{service.TCP, service.UDP} {
				ports = append(ports, service.Destination{Addr: a, Port: port, Protocol: p})
				want = append(want, fmt.Sprintf("%s %d %d", a, port, redirect.ProtocolNumber(p)))
			}
		}
	}
	apply(t, r, State{NonLocal: redirect.SetOf(addrs("192.0.2.0 192.0.2.1 192.0.2.2 192.0.2.3")...), PortRules: redirect.SetOf(ports...)}, true)
	rules := must.Get(r.rules(service.IPv4))(t)
	var got []string
	for _, k := range rules {
		if own, ok := parseRule(&k); ok && r.isOurRule(&k) {
			got = append(got, fmt.Sprintf("%s %d %d", own.to, own.first, own.protocol))
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("got\n%q, want\n%q", got, want)
	}
}

func TestClashes(t *testing.T) {
	mask := uint32(0xffffffff)
	for _, c := range []struct {
		name  string
		rule  netlink.Rule
		route string // in the table 8376
		want  string // what the error says; empty for none
		left  string // what is not in force then
	}{
		{"mark that has our bit", netlink.Rule{Mark: 0x1200, Table: 100}, "", "rule fwmark 0x1200/0xffffffff lookup 100 priority 50 is there", "fwmark 0x1000"},
		{"mark that does not", netlink.Rule{Mark: 0xca6c, Table: 51820}, "", "", ""},
		{"our table", netlink.Rule{Mark: 0x4, Mask: &mask, Table: 8377}, "", "lookup 8377 priority 50 is there", "lookup 8377"},
		{"route in our table", netlink.Rule{}, "10.201.0.0/16", "route 10.201.0.0/16 (type 1, proto 4) of the table 8376 is there", "lookup 8376"},
	} {
		t.Run(c.name, func(t *testing.T) {
			lab := netns.NewLab(t, 0)
			lab.Settle(t)
			nl := lab.Node.Netlink()
			if c.rule.Table != 0 {
				rule := netlink.NewRule()
				rule.Mark, rule.Mask, rule.Table, rule.Priority = c.rule.Mark, c.rule.Mask, c.rule.Table, 50
				must.OK(t, nl.RuleAdd(rule))
			}
			if c.route != "" {
				_, dst, _ := net.ParseCIDR(c.route)
				must.OK(t, nl.RouteAdd(&netlink.Route{LinkIndex: 1, Dst: dst, Table: DefaultSteerTable, Protocol: 4}))
			}
			before := lab.Node.Dump(t)
			r := open(t, lab.Node, Options{})
			s := State{Local: redirect.LocalOf(prefixes("10.96.0.0/16")...), NonLocal: redirect.SetOf(addrs("192.0.2.1")...), MarkSteers: true, MarkReplies: true, ReplyPorts: redirect.ReplyPorts}
			if err := r.Check(s); (err == nil) != (c.want == "") {
				t.Errorf("check: %v", err)
			}
			_, err := r.Apply(s)
			var clash *redirect.ClashError
			if c.want == "" && err != nil || c.want != "" && (!errors.As(err, &clash) || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			got := dump(t, r)
			check.Contains(t, got, "10.96.0.0/16")
			for _, k := range strings.Split(got, "\n") {
				if c.left != "" && strings.HasPrefix(k, "rule fwmark") && strings.Contains(k, c.left) {
					t.Errorf("in force in spite of the clash: %s", k)
				}
			}
			must.OK(t, must.Err(r.Remove()))
			check.Textf(t, lab.Node.Dump(t), before, "left behind")
		})
	}
}

// A route for the very range in the table local is a clash, unless it makes the
// range local too.
func TestRouteForTheSameRange(t *testing.T) {
	lab := netns.NewLab(t, 0)
	somebodyElses(t, lab.Node)
	r := open(t, lab.Node, Options{})
	apply(t, r, State{Local: redirect.LocalOf(prefixes("10.96.0.0/16 10.200.0.0/16")...)}, true)
	if got := dump(t, r); strings.Contains(got, "10.200") {
		t.Errorf("taken over:\n%s", got)
	}
	var clash *redirect.ClashError
	if _, err := r.Apply(State{Local: redirect.LocalOf(prefixes("10.1.0.255/32")...)}); !errors.As(err, &clash) {
		t.Errorf("the broadcast address of an interface: got %v, want a clash", err)
	}
}

// Where IPv6 is switched off, the rest works, and only an IPv6 address is an
// error.
func TestWithoutIPv6(t *testing.T) {
	lab := netns.NewLab(t, 0)
	must.OK(t, lab.Node.SetSysctl("net/ipv6/conf/all/disable_ipv6", "1"))
	r := open(t, lab.Node, Options{})
	s := State{Local: redirect.LocalOf(prefixes("10.96.0.0/16")...), NonLocal: redirect.SetOf(addrs("192.0.2.1")...), MarkSteers: true, MarkReplies: true, ReplyPorts: [2]uint16{61000, 65534}}
	apply(t, r, s, true)
	apply(t, r, s, false)
	if got := dump(t, r); strings.Contains(got, "rule -6") || strings.Contains(got, ":") {
		t.Errorf("in force:\n%s", got)
	}
	s.Local = redirect.LocalOf(prefixes("10.96.0.0/16 fd01::/112")...)
	check.Error(t, must.Err(r.Apply(s)), "IPv6 switched off")
}

func TestCheckLocal(t *testing.T) {
	lab := netns.NewLab(t, 0)
	r := open(t, lab.Node, Options{})
	for _, c := range []struct{ ranges, want string }{
		{"10.96.0.0/16 fd01::/112", ""},
		{"10.96.0.0/16 10.1.0.0/16", "local 10.1.0.0/16: takes in this node's own address 10.1.0.1"},
		{"fd00::/16", "own address fd00:1::1"},
	} {
		if err := r.CheckLocal(prefixes(c.ranges)); (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.ranges, err, c.want)
		}
	}
}

func TestSourceChecks(t *testing.T) {
	lab := netns.NewLab(t, 0)
	check := func(want ...string) {
		t.Helper()
		if got, err := SourceChecks(lab.Node.FD()); err != nil || !slices.Equal(got, want) {
			t.Errorf("got %q, %v, want %q", got, err, want)
		}
	}
	check()
	must.OK(t, lab.Node.SetSysctl("net/ipv4/conf/client/src_valid_mark", "1"))
	check("client")
	must.OK(t, lab.Node.SetSysctl("net/ipv4/conf/all/src_valid_mark", "1"))
	check("all", "client")
}

// Nobody else's rule may lead packets of our sockets astray.
func TestCheckSockets(t *testing.T) {
	lab := netns.NewLab(t, 0)
	r := open(t, lab.Node, Options{SocketMark: 0x100})
	for _, c := range []struct {
		mark, mask uint32
		clash      bool
	}{
		{0x100, 0x100, true},
		{0x100, 0xffffffff, true},
		{0x900, 0xffffffff, false}, // ours have no other bit
		{0x200, 0x300, false},
	} {
		rule := netlink.NewRule()
		rule.Mark, rule.Mask, rule.Table, rule.Priority, rule.Family = c.mark, &c.mask, 100, 50, netlink.FAMILY_V6
		must.OK(t, lab.Node.Netlink().RuleAdd(rule))
		var clash *redirect.ClashError
		if err := r.CheckSockets(); errors.As(err, &clash) != c.clash {
			t.Errorf("%#x/%#x: %v, want a clash %v", c.mark, c.mask, err, c.clash)
		}
		must.OK(t, lab.Node.Netlink().RuleDel(rule))
	}
}

func TestOptionsThatCannotBe(t *testing.T) {
	for _, c := range []struct {
		opts Options
		want string
	}{
		{Options{}, ""},
		{Options{SteerMark: 3}, "single bit"},
		{Options{SteerMark: 4, ReplyMark: 4}, "two different"},
		{Options{SocketMark: 5}, "single bit"},
		{Options{SocketMark: DefaultReplyMark}, "want different ones"},
		{Options{SteerTable: 9, ReplyTable: 9}, "want different"},
		{Options{SteerTable: 254}, "a number of our own"},
		{Options{RulePriority: 32766}, "priority"},
		{Options{NodeIPs: addrs("10.0.0.1 10.0.0.2")}, "one of each family"},
		{Options{NodeIPs: make([]netip.Addr, 1)}, "one of each family"},
	} {
		err := c.opts.WithDefaults().Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got %v, want %q", c.opts, err, c.want)
		}
	}
}
