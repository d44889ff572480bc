package sockfilter

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/race"
)

// packet is what a program can see of one.
type packet struct {
	from netip.Addr
	to   netip.AddrPort
}

// run is the kernel's interpreter, as far as these programs go. It fails where
// the kernel would refuse the program.
func run(t testing.TB, program []sys.FilterOp, p packet) (kept bool) {
	t.Helper()
	network := make([]byte, 40)
	source, dest := source4, dest4
	if p.from.Is6() {
		source, dest = source6, dest6
	}
	copy(network[source:], p.from.AsSlice())
	copy(network[dest:], p.to.Addr().AsSlice())
	transport := binary.BigEndian.AppendUint16([]byte{0x12, 0x34}, p.to.Port())

	var acc uint32
	for pc := 0; pc < len(program); pc++ {
		op := program[pc]
		skip := func(yes bool) {
			if yes {
				pc += int(op.Jt)
			} else {
				pc += int(op.Jf)
			}
		}
		switch op.Code {
		case sys.FilterLoadWord:
			acc = binary.BigEndian.Uint32(network[op.K-sys.FilterNetwork:])
		case sys.FilterLoadHalf:
			acc = uint32(binary.BigEndian.Uint16(transport[op.K:]))
		case sys.FilterJump:
			pc += int(op.K)
		case sys.FilterIfEqual:
			skip(acc == op.K)
		case sys.FilterIfAbove:
			skip(acc > op.K)
		case sys.FilterIfLeast:
			skip(acc >= op.K)
		case sys.FilterReturn:
			return op.K != 0
		default:
			t.Fatalf("instruction %d: code %#x", pc, op.Code)
		}
	}
	t.Fatalf("the program of %d instructions has no end for %v", len(program), p)
	return false
}

// admits is what a program should say, slowly and plainly.
func admits(rules []Rule, p packet) bool {
	for _, r := range rules {
		if p.to != netip.AddrPortFrom(r.Addr, r.Port) {
			continue
		}
		for _, a := range r.Allowed {
			if a.Contains(p.from) {
				return true
			}
		}
		return false
	}
	return true
}

func prefixes(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func TestCompile(t *testing.T) {
	v4 := []Rule{
		{netip.MustParseAddr("192.0.2.1"), 80, prefixes("10.0.0.0/8", "203.0.113.7/32", "10.1.0.0/16", "198.51.100.0/25", "198.51.100.128/25")},
		{netip.MustParseAddr("192.0.2.1"), 443, nil},
		{netip.MustParseAddr("192.0.2.2"), 80, prefixes("0.0.0.0/0")},
		{netip.MustParseAddr("192.0.2.3"), 80, prefixes("2001:db8::/32")},
	}
	v6 := []Rule{
		{netip.MustParseAddr("2001:db8::1"), 80, prefixes("fd00::/8", "2001:db8:1::/48", "2001:db8:2::/64", "2001:db8:2:1::5/128")},
		{netip.MustParseAddr("2001:db8::2"), 80, prefixes("::/0")},
	}
	for _, c := range []struct {
		rules    []Rule
		from, to string
		want     bool
	}{
		{v4, "10.0.0.0", "192.0.2.1:80", true},
		{v4, "10.255.255.255", "192.0.2.1:80", true},
		{v4, "9.255.255.255", "192.0.2.1:80", false},
		{v4, "11.0.0.0", "192.0.2.1:80", false},
		{v4, "203.0.113.7", "192.0.2.1:80", true},
		{v4, "203.0.113.6", "192.0.2.1:80", false},
		{v4, "203.0.113.8", "192.0.2.1:80", false},
		{v4, "198.51.100.255", "192.0.2.1:80", true},
		{v4, "198.51.101.0", "192.0.2.1:80", false},
		{v4, "0.0.0.0", "192.0.2.1:80", false},
		{v4, "255.255.255.255", "192.0.2.1:80", false},
		{v4, "10.0.0.1", "192.0.2.1:443", false},
		{v4, "9.0.0.1", "192.0.2.1:8080", true},
		{v4, "255.255.255.255", "192.0.2.2:80", true},
		{v4, "0.0.0.0", "192.0.2.2:80", true},
		{v4, "10.0.0.1", "192.0.2.3:80", false},
		{v4, "10.0.0.1", "192.0.2.4:80", true},
		{v6, "fd12::1", "[2001:db8::1]:80", true},
		{v6, "fc00::1", "[2001:db8::1]:80", false},
		{v6, "2001:db8:1:ffff::1", "[2001:db8::1]:80", true},
		{v6, "2001:db8:2::9", "[2001:db8::1]:80", true},
		{v6, "2001:db8:2:1::5", "[2001:db8::1]:80", true},
		{v6, "2001:db8:2:1::6", "[2001:db8::1]:80", false},
		{v6, "2001:db8:3::1", "[2001:db8::1]:80", false},
		{v6, "::", "[2001:db8::2]:80", true},
		{v6, "::", "[2001:db8::3]:80", true},
		{v6, "::", "[2001:db8::1]:81", true},
	} {
		p := packet{netip.MustParseAddr(c.from), netip.MustParseAddrPort(c.to)}
		program := must.Get(Compile(c.rules))(t)
		if got := run(t, program, p); got != c.want || admits(c.rules, p) != c.want {
			t.Errorf("%v: got %t, the model says %t, want %t", p, got, admits(c.rules, p), c.want)
		}
	}
	if run(t, Nothing, packet{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddrPort("192.0.2.1:80")}) {
		t.Error("Nothing keeps a packet")
	}
	if p, err := Compile(nil); err != nil || !run(t, p, packet{netip.MustParseAddr("::1"), netip.MustParseAddrPort("[::1]:80")}) {
		t.Errorf("no rules: %v, %v", p, err)
	}
}

func TestCompileRefuses(t *testing.T) {
	a := netip.MustParseAddr("192.0.2.1")
	for name, rules := range map[string][]Rule{
		"two families":  {{Addr: a, Port: 1}, {Addr: netip.IPv6Loopback(), Port: 1}},
		"two rules":     {{Addr: a, Port: 1}, {Addr: a, Port: 1}},
		"no address":    {{Port: 1}},
		"mapped":        {{Addr: netip.MustParseAddr("::ffff:192.0.2.1"), Port: 1}},
		"with its zone": {{Addr: netip.MustParseAddr("fe80::1%2"), Port: 1}},
	} {
		if p, err := Compile(rules); err == nil || errors.Is(err, ErrTooLong) {
			t.Errorf("%s: %d instructions, %v", name, len(p), err)
		}
	}
}

// scattered returns n ranges of 32 - or 64 - bit addresses that do not touch.
func scattered(n int, v6 bool) (list []netip.Prefix) {
	for i := range n {
		if v6 {
			list = append(list, netip.MustParsePrefix(fmt.Sprintf("2001:db8:%x:%x::/64", i/256, 2*(i%256))))
		} else {
			list = append(list, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i / 256), byte(i), 7}), 32))
		}
	}
	return list
}

func TestThousandsOfRangesFit(t *testing.T) {
	for _, c := range []struct {
		name  string
		addr  string
		count int
		v6    bool
	}{
		{"IPv4", "192.0.2.1", 1900, false},
		{"IPv6", "2001:db8::1", 1000, true},
	} {
		rules := []Rule{{netip.MustParseAddr(c.addr), 80, scattered(c.count, c.v6)}}
		program, err := Compile(rules)
		must.OKf(t, err, "%s: %d ranges", c.name, c.count)
		t.Logf("%s: %d ranges, %d instructions", c.name, c.count, len(program))
		to := netip.AddrPortFrom(rules[0].Addr, 80)
		for _, p := range rules[0].Allowed {
			for _, from := range []netip.Addr{p.Addr(), p.Addr().Next(), p.Addr().Prev()} {
				q := packet{from, to}
				must.Equalf(t, run(t, program, q), admits(rules, q), "%v", q)
			}
		}
	}
	_, err := Compile([]Rule{{netip.MustParseAddr("192.0.2.1"), 80, scattered(5000, false)}})
	check.ErrorIsf(t, err, ErrTooLong, "5000 ranges")
}

// random makes rules and packets that have to do with them of some bytes.
func random(r *rand.Rand) (rules []Rule, packets []packet) {
	v6 := r.IntN(2) == 0
	addr := func() netip.Addr {
		if v6 {
			a := [16]byte{0x20, 0x01, 0x0d, 0xb8}
			for i := range 6 {
				a[2*i+4] = byte(r.IntN(3)) * 0x55
			}
			return netip.AddrFrom16(a)
		}
		return netip.AddrFrom4([4]byte{byte(r.IntN(4)) * 85, byte(r.IntN(2)), byte(r.IntN(3)), byte(r.IntN(256))})
	}
	seen := make(map[netip.AddrPort]bool)
	for range r.IntN(12) {
		rule := Rule{Addr: addr(), Port: uint16(r.IntN(3) + 1)}
		at := netip.AddrPortFrom(rule.Addr, rule.Port)
		if seen[at] {
			continue
		}
		seen[at] = true
		for range r.IntN(1 << r.IntN(9)) {
			a := addr()
			rule.Allowed = append(rule.Allowed, netip.PrefixFrom(a, a.BitLen()-min(r.IntN(a.BitLen()+1), r.IntN(a.BitLen()+1))))
		}
		rules = append(rules, rule)
	}
	for range 64 {
		p := packet{addr(), netip.AddrPortFrom(addr(), uint16(r.IntN(4)))}
		if len(rules) > 0 && r.IntN(4) > 0 {
			rule := rules[r.IntN(len(rules))]
			p.to = netip.AddrPortFrom(rule.Addr, rule.Port)
			if n := len(rule.Allowed); n > 0 && r.IntN(2) == 0 {
				p.from = rule.Allowed[r.IntN(n)].Addr()
				switch r.IntN(3) {
				case 0:
					p.from = p.from.Next()
				case 1:
					p.from = p.from.Prev()
				}
			}
			if !p.from.IsValid() || p.from.Is6() != v6 {
				p.from = addr()
			}
		}
		packets = append(packets, p)
	}
	return rules, packets
}

func compare(t testing.TB, r *rand.Rand) (tooLong bool) {
	t.Helper()
	rules, packets := random(r)
	program, err := Compile(rules)
	if errors.Is(err, ErrTooLong) {
		return true
	}
	must.OKf(t, err, "%v", rules)
	for _, p := range packets {
		if p.from.Is6() != p.to.Addr().Is6() {
			continue
		}
		if len(rules) > 0 && rules[0].Addr.Is6() != p.from.Is6() {
			continue
		}
		if got, want := run(t, program, p), admits(rules, p); got != want {
			t.Fatalf("%v: got %t, want %t\n%v", p, got, want, rules)
		}
	}
	return false
}

func TestCompileAgainstModel(t *testing.T) {
	tooLong, programs := 0, race.Fewer(3000)
	for seed := range uint64(programs) {
		if compare(t, rand.New(rand.NewPCG(1, seed))) {
			tooLong++
		}
	}
	if tooLong > programs/10 {
		t.Errorf("%d of %d programs were too long to be compared", tooLong, programs)
	}
}

func FuzzCompile(f *testing.F) {
	f.Add(uint64(1), uint64(2))
	f.Fuzz(func(t *testing.T, a, b uint64) { compare(t, rand.New(rand.NewPCG(a, b))) })
}

func BenchmarkCompile(b *testing.B) {
	for _, n := range []int{4, 100, 1000} {
		rules := []Rule{{netip.MustParseAddr("192.0.2.1"), 80, scattered(n, false)}}
		b.Run(fmt.Sprintf("ranges=%d", n), func(b *testing.B) {
			for b.Loop() {
				must.OK(b, must.Err(Compile(rules)))
			}
		})
	}
}
