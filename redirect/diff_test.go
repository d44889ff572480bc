package redirect

import (
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/service"
)

func tcp(s string) service.Destination {
	ap := netip.MustParseAddrPort(s)
	return service.Destination{Addr: ap.Addr(), Port: ap.Port(), Protocol: service.TCP}
}

func prefixes(s string) []netip.Prefix {
	var ps []netip.Prefix
	for _, f := range strings.Fields(s) {
		ps = append(ps, netip.MustParsePrefix(f))
	}
	return ps
}

func addrSet(s string) map[netip.Addr]struct{} {
	return map[netip.Addr]struct{}{netip.MustParseAddr(s): {}}
}

func TestDiff(t *testing.T) {
	from := &Plan{
		Steer:      map[service.Destination]Target{tcp("10.96.0.1:80"): {Port: 1}, tcp("10.96.0.2:80"): {Port: 2}, tcp("[fd01::1]:80"): {Port: 3}},
		Refuse:     map[service.Destination]struct{}{tcp("10.96.0.3:80"): {}},
		Local:      prefixes("10.96.0.0/16"),
		ClusterIPs: map[netip.Addr]struct{}{netip.MustParseAddr("10.96.0.1"): {}},
	}
	to := &Plan{
		Steer:      map[service.Destination]Target{tcp("10.96.0.1:80"): {Port: 9}, tcp("10.96.0.3:80"): {Port: 4}, tcp("[fd01::1]:80"): {Port: 3}},
		Refuse:     map[service.Destination]struct{}{tcp("10.96.0.2:80"): {}},
		Local:      prefixes("10.96.0.0/16 fd01::1/128"),
		ClusterIPs: map[netip.Addr]struct{}{netip.MustParseAddr("fd01::1"): {}},
	}
	want := Changes{
		Steer:       []Steering{{tcp("10.96.0.1:80"), Target{Port: 9}, true}, {tcp("10.96.0.3:80"), Target{Port: 4}, false}},
		Unsteer:     []service.Destination{tcp("10.96.0.2:80")},
		Refuse:      []service.Destination{tcp("10.96.0.2:80")},
		Unrefuse:    []service.Destination{tcp("10.96.0.3:80")},
		AddCluster:  []netip.Addr{netip.MustParseAddr("fd01::1")},
		DropCluster: []netip.Addr{netip.MustParseAddr("10.96.0.1")},
		AddLocal:    prefixes("fd01::1/128"),
	}
	if got := Diff(from, to); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if same := Diff(to, to); !same.Empty() {
		t.Errorf("a plan differs from itself: %+v", same)
	}
}

// A diff that is carried out by hand on the old plan must give the new one.
func TestDiffLeadsToTheOtherPlan(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	plan := func() *Plan {
		p := &Plan{
			Steer: map[service.Destination]Target{}, Refuse: map[service.Destination]struct{}{}, Silent: map[service.Destination]struct{}{},
			ClusterIPs: map[netip.Addr]struct{}{}, Foreign: map[netip.Addr]struct{}{},
			Lingering: map[service.Destination]struct{}{}, Own: map[service.Destination]struct{}{},
		}
		for i := range byte(20) {
			d := service.Destination{Addr: netip.AddrFrom4([4]byte{10, 96, 0, i}), Port: 80, Protocol: service.TCP}
			switch rnd.IntN(4) {
			case 0:
				p.Steer[d] = Target{Port: uint16(1 + rnd.IntN(2))}
			case 1:
				p.Refuse[d] = struct{}{}
			case 2:
				p.Silent[d] = struct{}{}
			}
			if rnd.IntN(2) == 0 {
				p.ClusterIPs[d.Addr] = struct{}{}
			}
			if rnd.IntN(3) == 0 {
				p.Foreign[d.Addr] = struct{}{}
			}
			if rnd.IntN(3) == 0 {
				p.Lingering[d] = struct{}{}
			}
			if rnd.IntN(3) == 0 {
				p.Own[d] = struct{}{}
			}
			if rnd.IntN(3) == 0 {
				p.Local = append(p.Local, netip.PrefixFrom(d.Addr, 27+rnd.IntN(6)))
			}
		}
		return p
	}
	for range 500 {
		from, to := plan(), plan()
		c := Diff(from, to)
		for _, d := range c.Unsteer {
			delete(from.Steer, d)
		}
		for _, s := range c.Steer {
			if _, was := from.Steer[s.Destination]; was != s.Replaces {
				t.Fatalf("%v: Replaces %v, was there: %v", s.Destination, s.Replaces, was)
			}
			from.Steer[s.Destination] = s.Target
		}
		for _, d := range c.Unrefuse {
			delete(from.Refuse, d)
		}
		for _, d := range c.Refuse {
			from.Refuse[d] = struct{}{}
		}
		for _, d := range c.Unsilence {
			delete(from.Silent, d)
		}
		for _, d := range c.Silence {
			from.Silent[d] = struct{}{}
		}
		for _, a := range c.DropCluster {
			delete(from.ClusterIPs, a)
		}
		for _, a := range c.AddCluster {
			from.ClusterIPs[a] = struct{}{}
		}
		carryOut(from.Foreign, c.AddForeign, c.DropForeign)
		carryOut(from.Lingering, c.Linger, c.Unlinger)
		carryOut(from.Own, c.AddOwn, c.DropOwn)
		local := slices.DeleteFunc(Cover(from.Local), func(p netip.Prefix) bool { return slices.Contains(c.DropLocal, p) })
		local = append(local, c.AddLocal...)
		slices.SortFunc(local, comparePrefixes)
		if !reflect.DeepEqual(from.Steer, to.Steer) || !reflect.DeepEqual(from.Refuse, to.Refuse) ||
			!reflect.DeepEqual(from.Silent, to.Silent) || !reflect.DeepEqual(from.Foreign, to.Foreign) ||
			!reflect.DeepEqual(from.Lingering, to.Lingering) || !reflect.DeepEqual(from.Own, to.Own) ||
			!reflect.DeepEqual(from.ClusterIPs, to.ClusterIPs) || !slices.Equal(local, Cover(to.Local)) {
			t.Fatalf("changes %+v do not lead to %+v", c, to)
		}
	}
}

func carryOut[K comparable](set map[K]struct{}, add, drop []K) {
	for _, k := range drop {
		delete(set, k)
	}
	for _, k := range add {
		set[k] = struct{}{}
	}
}

func TestCovers(t *testing.T) {
	cover := Cover(prefixes("10.96.0.0/16 10.98.0.1/32 fd01::/112"))
	for addr, want := range map[string]bool{
		"10.95.255.255": false, "10.96.0.0": true, "10.96.255.255": true, "10.97.0.0": false, "10.98.0.1": true,
		"10.98.0.2": false, "fd00::1": false, "fd01::ffff": true, "fd01::1:0": false,
	} {
		if got := Covers(cover, netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: got %v", addr, got)
		}
	}
	if Covers(nil, netip.MustParseAddr("10.0.0.1")) {
		t.Error("nothing covers something")
	}
}

func TestCover(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"", ""},
		{"10.96.0.7/12", "10.96.0.0/12"},
		{"10.96.0.1/32 10.96.0.0/12 10.111.0.0/16", "10.96.0.0/12"},
		{"10.96.0.1/32 10.96.0.2/32 10.96.0.1/32", "10.96.0.1/32 10.96.0.2/32"},
		{"fd01::/64 10.0.0.0/8 fd01::5/128", "10.0.0.0/8 fd01::/64"},
	} {
		in := prefixes(c.in)
		before := slices.Clone(in)
		if got := Cover(in); !slices.Equal(got, prefixes(c.want)) {
			t.Errorf("%s: got %v, want %s", c.in, got, c.want)
		}
		if !slices.Equal(in, before) {
			t.Errorf("%s: the argument became %v", c.in, in)
		}
	}
}

func TestValidate(t *testing.T) {
	good := tcp("10.96.0.1:80")
	for _, c := range []struct {
		plan Plan
		want string
	}{
		{Plan{}, ""},
		{Plan{Steer: map[service.Destination]Target{good: {Port: 1}}, Local: prefixes("10.96.0.0/12 fd00::/108")}, ""},
		{Plan{Steer: map[service.Destination]Target{good: {}}}, "listener port 0"},
		{Plan{Steer: map[service.Destination]Target{good: {Port: 1}}, Refuse: map[service.Destination]struct{}{good: {}}}, "steered and refused"},
		{Plan{Steer: map[service.Destination]Target{good: {Port: 1}}, Silent: map[service.Destination]struct{}{good: {}}}, "steered and silent"},
		{Plan{Refuse: map[service.Destination]struct{}{good: {}}, Silent: map[service.Destination]struct{}{good: {}}}, "refused and silent"},
		{Plan{Refuse: map[service.Destination]struct{}{{Addr: good.Addr, Port: 80}: {}}}, "protocol 0"},
		{Plan{Refuse: map[service.Destination]struct{}{tcp("10.96.0.1:0"): {}}}, "port 0"},
		{Plan{Refuse: map[service.Destination]struct{}{tcp("[::ffff:10.96.0.1]:1"): {}}}, "plain"},
		{Plan{ClusterIPs: map[netip.Addr]struct{}{netip.MustParseAddr("127.0.0.1"): {}}}, "not an address of a service"},
		{Plan{Local: prefixes("0.0.0.0/0")}, "every address"},
		{Plan{Local: prefixes("126.0.0.0/7")}, "127.0.0.0/8"},
		{Plan{Local: prefixes("fe80::/64")}, "fe80::/10"},
		{Plan{Foreign: addrSet("192.0.2.1"), Local: prefixes("10.96.0.0/12")}, ""},
		{Plan{Foreign: addrSet("10.96.0.1"), Local: prefixes("10.96.0.0/12")}, "lies in a range that is local"},
		{Plan{Foreign: addrSet("127.0.0.1")}, "not an address of a service"},
		{Plan{Foreign: addrSet("10.96.0.1"), Lingering: map[service.Destination]struct{}{good: {}}}, ""},
		{Plan{Lingering: map[service.Destination]struct{}{good: {}}}, "not on a foreign address"},
		{Plan{Own: map[service.Destination]struct{}{tcp("127.0.0.1:30000"): {}}}, ""},
		{Plan{Own: map[service.Destination]struct{}{tcp("224.0.0.1:30000"): {}}}, "not an address of a service"},
		{Plan{Local: make([]netip.Prefix, 1)}, "not an IPv4 or IPv6 range"},
	} {
		err := c.plan.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got %v, want %q", c.plan, err, c.want)
		}
	}
}
