package redirect

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
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

func addrSet(s string) Set[netip.Addr] { return SetOf(netip.MustParseAddr(s)) }

func TestDiff(t *testing.T) {
	from := &Plan{
		Steer:      mapOf(map[service.Destination]Target{tcp("10.96.0.1:80"): {Port: 1}, tcp("10.96.0.2:80"): {Port: 2}, tcp("[fd01::1]:80"): {Port: 3}}),
		Refuse:     SetOf(tcp("10.96.0.3:80")),
		Local:      SetOf(prefixes("10.96.0.0/16")...),
		ClusterIPs: addrSet("10.96.0.1"),
	}
	to := &Plan{
		Steer:      mapOf(map[service.Destination]Target{tcp("10.96.0.1:80"): {Port: 9}, tcp("10.96.0.3:80"): {Port: 4}, tcp("[fd01::1]:80"): {Port: 3}}),
		Refuse:     SetOf(tcp("10.96.0.2:80")),
		Local:      SetOf(prefixes("10.96.0.0/16 fd01::1/128")...),
		ClusterIPs: addrSet("fd01::1"),
	}
	want := Changes{
		Steer:      []Steering{{tcp("10.96.0.1:80"), Target{Port: 9}, true}, {tcp("10.96.0.3:80"), Target{Port: 4}, false}},
		Unsteer:    []service.Destination{tcp("10.96.0.2:80")},
		Refuse:     Delta[service.Destination]{[]service.Destination{tcp("10.96.0.2:80")}, []service.Destination{tcp("10.96.0.3:80")}},
		ClusterIPs: Delta[netip.Addr]{[]netip.Addr{netip.MustParseAddr("fd01::1")}, []netip.Addr{netip.MustParseAddr("10.96.0.1")}},
		Local:      Delta[netip.Prefix]{Add: prefixes("fd01::1/128")},
	}
	if got := Diff(from, to); !reflect.DeepEqual(got, want) {
		t.Errorf("got  %+v\nwant %+v", got, want)
	}
	if same := Diff(to, to); !same.Empty() {
		t.Errorf("a plan differs from itself: %+v", same)
	}
}

// slowPlan is a plan in plain maps, which share nothing.
type slowPlan struct {
	steer                          map[service.Destination]Target
	refuse, silent, lingering, own map[service.Destination]struct{}
	clusterIPs, foreign            map[netip.Addr]struct{}
	local                          map[netip.Prefix]struct{}
}

func slow(p *Plan) slowPlan {
	return slowPlan{maps.Collect(p.Steer.All()), maps.Collect(p.Refuse.All()), maps.Collect(p.Silent.All()), maps.Collect(p.Lingering.All()),
		maps.Collect(p.Own.All()), maps.Collect(p.ClusterIPs.All()), maps.Collect(p.NonLocal.All()), maps.Collect(p.Local.All())}
}

// carryOut does by hand what changes say.
func (p *slowPlan) carryOut(t *testing.T, c *Changes) {
	t.Helper()
	for _, d := range c.Unsteer {
		delete(p.steer, d)
	}
	for _, s := range c.Steer {
		if _, was := p.steer[s.Destination]; was != s.Replaces {
			t.Fatalf("%v: Replaces %v, was there: %v", s.Destination, s.Replaces, was)
		}
		p.steer[s.Destination] = s.Target
	}
	carryOut(t, p.refuse, c.Refuse)
	carryOut(t, p.silent, c.Silent)
	carryOut(t, p.lingering, c.Lingering)
	carryOut(t, p.own, c.Own)
	carryOut(t, p.clusterIPs, c.ClusterIPs)
	carryOut(t, p.foreign, c.NonLocal)
	carryOut(t, p.local, c.Local)
}

func carryOut[K Key](t *testing.T, set map[K]struct{}, d Delta[K]) {
	t.Helper()
	for _, k := range d.Drop {
		if _, was := set[k]; !was {
			t.Fatalf("%v is to go and is not there", k)
		}
		delete(set, k)
	}
	for _, k := range d.Add {
		if _, was := set[k]; was {
			t.Fatalf("%v is to come and is there", k)
		}
		set[k] = struct{}{}
	}
}

// randomPlan has few destinations. It changes some of another plan, or is made
// of nothing.
func randomPlan(rnd *rand.Rand, p Plan) *Plan {
	for i := range byte(20) {
		if rnd.IntN(3) == 0 {
			continue
		}
		d := service.Destination{Addr: netip.AddrFrom4([4]byte{10, 96, 0, i}), Port: 80, Protocol: service.TCP}
		p.Steer, p.Refuse, p.Silent = p.Steer.Without(d), p.Refuse.Without(d), p.Silent.Without(d)
		switch rnd.IntN(4) {
		case 0:
			p.Steer = p.Steer.With(d, Target{Port: uint16(1 + rnd.IntN(2))})
		case 1:
			p.Refuse = p.Refuse.With(d, struct{}{})
		case 2:
			p.Silent = p.Silent.With(d, struct{}{})
		}
		p.ClusterIPs = randomly(rnd, p.ClusterIPs, d.Addr)
		p.NonLocal = randomly(rnd, p.NonLocal, d.Addr)
		p.Lingering = randomly(rnd, p.Lingering, d)
		p.Own = randomly(rnd, p.Own, d)
		p.Local = LocalOf(Ranges(randomly(rnd, p.Local, netip.PrefixFrom(d.Addr, 27+rnd.IntN(6)).Masked()))...)
	}
	return &p
}

func randomly[K Key](rnd *rand.Rand, set Set[K], k K) Set[K] {
	if rnd.IntN(3) == 0 {
		return set.With(k, struct{}{})
	}
	return set.Without(k)
}

// A diff that is carried out by hand on the old plan must give the new one,
// whether the two share much or nothing.
func TestDiffLeadsToTheOtherPlan(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	from := &Plan{}
	for range 1000 {
		base := Plan{}
		if rnd.IntN(3) > 0 {
			base = *from
		}
		to := randomPlan(rnd, base)
		before := slow(from)
		c := Diff(from, to)
		if after := slow(from); !reflect.DeepEqual(before, after) {
			t.Fatalf("a plan that was handed on became %+v", after)
		}
		before.carryOut(t, &c)
		if want := slow(to); !reflect.DeepEqual(before, want) {
			t.Fatalf("changes %+v do not lead to %+v", c, want)
		}
		touched := map[service.Destination]bool{}
		for d := range c.Touched {
			touched[d] = true
		}
		for i := range byte(20) {
			d := service.Destination{Addr: netip.AddrFrom4([4]byte{10, 96, 0, i}), Port: 80, Protocol: service.TCP}
			was, _ := from.Steer.Get(d)
			is, _ := to.Steer.Get(d)
			differs := was != is || from.Refuse.Has(d) != to.Refuse.Has(d) || from.Silent.Has(d) != to.Silent.Has(d) || from.Lingering.Has(d) != to.Lingering.Has(d)
			must.Equalf(t, touched[d], differs, "%s is touched", d)
		}
		from = to
	}
}

func TestIsLocal(t *testing.T) {
	local := LocalOf(prefixes("10.96.0.0/16 10.98.0.1/32 fd01::/112")...)
	for addr, want := range map[string]bool{
		"10.95.255.255": false, "10.96.0.0": true, "10.96.255.255": true, "10.97.0.0": false, "10.98.0.1": true,
		"10.98.0.2": false, "fd00::1": false, "fd01::ffff": true, "fd01::1:0": false,
	} {
		check.Equalf(t, IsLocal(local, netip.MustParseAddr(addr)), want, "%s", addr)
	}
	if IsLocal(Set[netip.Prefix]{}, netip.MustParseAddr("10.0.0.1")) {
		t.Error("nothing covers something")
	}
}

// What two of Plan.Local cover together is the cover of all of both.
func TestJoined(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	random := func() Set[netip.Prefix] {
		var list []netip.Prefix
		for range rnd.IntN(6) {
			list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 96, 0, byte(rnd.IntN(16))}), 32-rnd.IntN(2)*rnd.IntN(4)))
		}
		return LocalOf(list...)
	}
	for range 2000 {
		a, b := random(), random()
		both := Joined(a, b)
		if want := Cover(append(Ranges(a), Ranges(b)...)); !slices.Equal(Ranges(both), want) {
			t.Fatalf("%v and %v: got %v, want %v", a, b, both, want)
		}
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
		check.EqualSlicesf(t, in, before, "%s: the argument became", c.in)
	}
}

func TestValidate(t *testing.T) {
	good := tcp("10.96.0.1:80")
	for _, c := range []struct {
		plan Plan
		want string
	}{
		{Plan{}, ""},
		{Plan{Steer: mapOf(map[service.Destination]Target{good: {Port: 1}}), Local: SetOf(prefixes("10.96.0.0/12 fd00::/108")...)}, ""},
		{Plan{Steer: mapOf(map[service.Destination]Target{good: {}})}, "listener port 0"},
		{Plan{Steer: mapOf(map[service.Destination]Target{good: {Port: 1}}), Refuse: SetOf(good)}, "steered and refused"},
		{Plan{Steer: mapOf(map[service.Destination]Target{good: {Port: 1}}), Silent: SetOf(good)}, "steered and silent"},
		{Plan{Refuse: SetOf(good), Silent: SetOf(good)}, "refused and silent"},
		{Plan{Refuse: SetOf(service.Destination{Addr: good.Addr, Port: 80})}, "protocol 0"},
		{Plan{Refuse: SetOf(tcp("10.96.0.1:0"))}, "port 0"},
		{Plan{Refuse: SetOf(tcp("[::ffff:10.96.0.1]:1"))}, "plain"},
		{Plan{ClusterIPs: addrSet("127.0.0.1")}, "loopback"},
		{Plan{Local: SetOf(prefixes("0.0.0.0/0")...)}, "every address"},
		{Plan{Local: SetOf(prefixes("126.0.0.0/7")...)}, "127.0.0.0/8"},
		{Plan{Local: SetOf(prefixes("fe80::/64")...)}, "fe80::/10"},
		{Plan{Local: SetOf(prefixes("10.96.0.1/16")...)}, "not the first address"},
		{Plan{Local: SetOf(prefixes("10.96.0.0/16 10.96.7.0/24")...)}, "lies in 10.96.0.0/16"},
		{Plan{Local: SetOf(prefixes("10.96.0.0/16 10.96.7.7/32")...)}, "lies in 10.96.0.0/16"},
		{Plan{NonLocal: addrSet("192.0.2.1"), Local: SetOf(prefixes("10.96.0.0/12")...)}, ""},
		{Plan{NonLocal: addrSet("10.96.0.1"), Local: SetOf(prefixes("10.96.0.0/12")...)}, "10.96.0.1"},
		{Plan{NonLocal: addrSet("10.96.0.1"), Local: SetOf(prefixes("10.96.0.1/32")...)}, "10.96.0.1"},
		{Plan{NonLocal: addrSet("127.0.0.1")}, "loopback"},
		{Plan{NonLocal: addrSet("10.96.0.1"), Lingering: SetOf(good)}, ""},
		{Plan{Lingering: SetOf(good)}, "not on a non-local address"},
		{Plan{Own: SetOf(tcp("127.0.0.1:30000"))}, ""},
		{Plan{Own: SetOf(tcp("169.254.20.10:30000"))}, ""},
		{Plan{Local: SetOf(netip.Prefix{})}, "not an IPv4 or IPv6 range"},
	} {
		err := c.plan.Validate()
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got %v, want %q", c.plan, err, c.want)
		}
	}
}

// TestExcept takes addresses out of ranges, and looks for every address.
func TestExcept(t *testing.T) {
	for _, c := range []struct {
		from    string
		without []string
		want    string
	}{
		{"10.96.0.0/30", nil, "[10.96.0.0/30]"},
		{"10.96.0.0/30", []string{"10.97.0.1", "fd00::1"}, "[10.96.0.0/30]"},
		{"10.96.0.0/30", []string{"10.96.0.1"}, "[10.96.0.0/32 10.96.0.2/31]"},
		{"10.96.0.0/30", []string{"10.96.0.2", "10.96.0.1", "10.96.0.2"}, "[10.96.0.0/32 10.96.0.3/32]"},
		{"10.96.0.4/32", []string{"10.96.0.4"}, "[]"},
		{"fd00::/126", []string{"fd00::"}, "[fd00::1/128 fd00::2/127]"},
	} {
		var without []netip.Addr
		for _, a := range c.without {
			without = append(without, netip.MustParseAddr(a))
		}
		check.Equalf(t, fmt.Sprint(Except(netip.MustParsePrefix(c.from), without)), c.want, "%s without %v", c.from, c.without)
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 100 {
		p := netip.MustParsePrefix("10.96.0.0/24")
		var without []netip.Addr
		for range r.IntN(20) {
			without = append(without, netip.AddrFrom4([4]byte{10, 96, 0, byte(r.IntN(256))}))
		}
		parts := Except(p, without)
		for i := range 256 {
			a := netip.AddrFrom4([4]byte{10, 96, 0, byte(i)})
			in := 0
			for _, part := range parts {
				if part.Contains(a) {
					in++
				}
			}
			if (in == 0) != slices.Contains(without, a) || in > 1 {
				t.Fatalf("%v without %v: %s is in %d of %v", p, without, a, in, parts)
			}
		}
	}
}

// TestManyRangesAreValidatedAtOnce has the service ranges cut into many, as a tenant
// can have it who gives Services to another proxy. To compare each with each takes
// a minute.
func TestManyRangesAreValidatedAtOnce(t *testing.T) {
	var plan Plan
	for i, whole := range []string{"10.96.0.0/12", "fd00:96::/108"} {
		var without []netip.Addr
		base := netip.MustParsePrefix(whole).Addr().AsSlice()
		for n := range 12_000 {
			b := slices.Clone(base)
			b[len(b)-2], b[len(b)-1] = byte(n*7>>8), byte(n*7)
			a, _ := netip.AddrFromSlice(b)
			without = append(without, a)
		}
		var b Builder[netip.Prefix, struct{}]
		for l := range plan.Local.Keys() {
			b.Set(l, struct{}{})
		}
		for _, l := range Except(netip.MustParsePrefix(whole), without) {
			b.Set(l, struct{}{})
		}
		if plan.Local = b.Map(); plan.Local.Len() < 25_000*(i+1) {
			t.Fatalf("%d ranges", plan.Local.Len())
		}
	}
	begin := cpuTime(t)
	must.OK(t, plan.Validate())
	if took := cpuTime(t) - begin; took > 15*time.Second {
		t.Errorf("%d ranges took %v", plan.Local.Len(), took)
	}
	plan.Local = plan.Local.With(netip.MustParsePrefix("10.0.0.0/8"), struct{}{})
	if err := plan.Validate(); err == nil {
		t.Error("a range within another one is accepted")
	}
}

// cpuTime is what this process has used, however busy the machine is.
func cpuTime(t *testing.T) time.Duration {
	t.Helper()
	var used syscall.Rusage
	must.OK(t, syscall.Getrusage(syscall.RUSAGE_SELF, &used))
	return time.Duration(used.Utime.Nano())
}

// Validate tells what is wrong with a plan, or nil.
func (p *Plan) Validate() error {
	c := Diff(&Plan{}, p)
	return c.Validate(p)
}

// BenchmarkDiff compares plans of 30,000 services that differ by one of them, and
// such a plan with an empty one.
func BenchmarkDiff(b *testing.B) {
	const services = 30_000
	var steer Builder[service.Destination, Target]
	var ips Builder[netip.Addr, struct{}]
	a := netip.MustParseAddr("10.96.0.1")
	for i := range services {
		steer.Set(service.Destination{Addr: a, Port: 80, Protocol: service.TCP}, Target{Port: uint16(1024 + i)})
		ips.Set(a, struct{}{})
		a = a.Next()
	}
	whole := Plan{Steer: steer.Map(), ClusterIPs: ips.Map(), Local: LocalOf(prefixes("10.96.0.0/12")...)}
	other := whole
	changed := tcp("10.96.0.77:80")
	other.Steer, other.Refuse = other.Steer.Without(changed), other.Refuse.With(changed, struct{}{})
	for _, c := range []struct {
		name string
		from *Plan
		size int
	}{{"one", &other, 2}, {"none", &whole, 0}, {"all", &Plan{}, 2*services + 1}} {
		b.Run(fmt.Sprintf("services=%d/changed=%s", services, c.name), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if d := Diff(c.from, &whole); d.Size() != c.size {
					b.Fatalf("%d changes, want %d", d.Size(), c.size)
				}
			}
		})
	}
}
