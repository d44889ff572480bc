package sklookup

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// Where the fields of struct bpf_sk_lookup lie, which is what the program is called with
// (linux/bpf.h). The local side is the destination that the client meant.
const (
	ctxFamily    = 8
	ctxProtocol  = 12
	ctxLocalIPv4 = 40
	ctxLocalIPv6 = 44
	ctxLocalPort = 60
)

// skDrop is the program's answer if it refuses.
const skDrop = 0

// ask runs the program as the kernel does for a packet to a destination, and
// gives what becomes of it: "pass", "drop", or the cookie of a socket.
func ask(t testing.TB, p *ebpf.Program, d service.Destination) string {
	t.Helper()
	// struct bpf_sk_lookup, 72 bytes; the remote side has to be there.
	in := make([]byte, 72)
	family := uint32(syscall.AF_INET)
	if d.Addr.Is6() {
		family = syscall.AF_INET6
		a := d.Addr.As16()
		copy(in[ctxLocalIPv6:], a[:])
		in[20] = 0xfd
	} else {
		a := d.Addr.As4()
		copy(in[ctxLocalIPv4:], a[:])
		in[16] = 10
	}
	binary.NativeEndian.PutUint32(in[ctxFamily:], family)
	binary.NativeEndian.PutUint32(in[ctxProtocol:], uint32(redirect.ProtocolNumber(d.Protocol)))
	binary.BigEndian.PutUint16(in[36:], 40000)
	binary.NativeEndian.PutUint32(in[ctxLocalPort:], uint32(d.Port))
	out := make([]byte, len(in))
	answer := must.Get(p.Run(&ebpf.RunOptions{Context: in, ContextOut: out}))(t)
	cookie := binary.NativeEndian.Uint64(out)
	switch {
	case answer == skDrop:
		return "drop"
	case cookie == 0:
		return "pass"
	}
	return fmt.Sprint("socket ", cookie)
}

// model says the same from the plan alone, in the plainest way.
func model(p *redirect.Plan, cookies map[string]string, d service.Destination) string {
	if target, is := p.Steer.Get(d); is {
		return cookies[fmt.Sprint("target ", target.FD)]
	}
	if p.Refuse.Has(d) {
		return "drop"
	}
	silent := cookies[fmt.Sprint("silent ", d.Protocol, d.Addr.Is4())]
	if p.Silent.Has(d) {
		return silent
	}
	if p.Lingering.Has(d) {
		return "drop"
	}
	if p.ClusterIPs.Has(d.Addr) {
		return "drop"
	}
	for l := range p.Local.Keys() {
		if l.Contains(d.Addr) {
			return silent
		}
	}
	return "pass"
}

// universe are the destinations that random plans are made of: few, so that
// plans overlap.
func universe() (all []service.Destination) {
	for i := range byte(24) {
		a := netip.AddrFrom4([4]byte{10, 96, 0, i})
		if i >= 12 {
			a = netip.MustParseAddr(fmt.Sprintf("fd01::%x", i))
		}
		for _, port := range []uint16{80, 81, 336} {
			for _, protocol := range []service.Protocol{service.TCP, service.UDP} {
				all = append(all, service.Destination{Addr: a, Port: port, Protocol: protocol})
			}
		}
	}
	return all
}

func randomPlan(rnd *rand.Rand, fronts []*steering.Front) redirect.Plan {
	p := steering.Plan()
	p.Local = redirect.LocalOf()
	seen := map[netip.Addr]bool{}
	for _, d := range universe() {
		switch rnd.IntN(6) {
		case 0:
			p.Steer = p.Steer.With(d, fronts[rnd.IntN(len(fronts))].Target(d))
		case 1:
			p.Refuse = p.Refuse.With(d, struct{}{})
		case 2:
			p.Silent = p.Silent.With(d, struct{}{})
		}
		if seen[d.Addr] {
			continue
		}
		seen[d.Addr] = true
		if rnd.IntN(2) == 0 {
			p.ClusterIPs = p.ClusterIPs.With(d.Addr, struct{}{})
		}
		if rnd.IntN(3) == 0 {
			p.Local = redirect.LocalOf(append(redirect.Ranges(p.Local), netip.PrefixFrom(d.Addr, d.Addr.BitLen()-rnd.IntN(4)).Masked())...)
		}
	}
	return p
}

// cookiesOf asks the map of sockets for what the program answers with.
func cookiesOf(t testing.TB, r *Redirector) map[string]string {
	t.Helper()
	cookie := func(s slot) string {
		var c uint64
		must.OKf(t, r.tables.sockets.Lookup(uint32(s), &c), "slot %d", s)
		return fmt.Sprint("socket ", c)
	}
	cookies := map[string]string{
		fmt.Sprint("silent ", service.TCP, true): cookie(silentTCP4), fmt.Sprint("silent ", service.UDP, true): cookie(silentUDP4),
		fmt.Sprint("silent ", service.TCP, false): cookie(silentTCP6), fmt.Sprint("silent ", service.UDP, false): cookie(silentUDP6),
	}
	for l, at := range r.tables.slots.used {
		cookies[fmt.Sprint("target ", l.target.FD)] = cookie(at.slot)
	}
	return cookies
}

// Whichever way led to a plan, by changes or by filling anew, the program says
// about every destination what the plan says, and Verify finds nothing wrong.
func TestProgramSaysWhatThePlanSays(t *testing.T) {
	lab := netns.NewLab(t, 0)
	fronts := []*steering.Front{steering.NewFront(t, lab.Node, "a"), steering.NewFront(t, lab.Node, "b"), steering.NewFront(t, lab.Node, "c")}
	r := newRedirector(t, lab.Node)
	defer r.Close()
	rnd := rand.New(rand.NewPCG(83, 5))
	strangers := []service.Destination{
		{Addr: netip.MustParseAddr("10.95.0.1"), Port: 80, Protocol: service.TCP},
		{Addr: netip.MustParseAddr("fd02::1"), Port: 80, Protocol: service.UDP},
	}
	for i := range 200 {
		p := randomPlan(rnd, fronts)
		if rnd.IntN(10) == 0 {
			r.whole = false
		}
		must.OK(t, r.Apply(p))
		cookies := cookiesOf(t, r)
		for _, d := range append(universe(), strangers...) {
			if got, want := ask(t, r.tables.program, d), model(&p, cookies, d); got != want {
				t.Fatalf("plan %d: %s: the program says %s, the plan %s", i, d, got, want)
			}
		}
		if matching, err := r.tables.match(&p); !matching || err != nil {
			t.Fatalf("plan %d: match: %v, %v", i, matching, err)
		}
		if n := len(r.tables.slots.used) + len(r.tables.slots.free) + int(firstSlot); r.tables.slots.next != 0 && n != int(r.tables.slots.next) {
			t.Fatalf("plan %d: %d slots are used or free, %d were given out", i, n, r.tables.slots.next)
		}
	}
}

// TestChangeGivesNoThirdAnswer: a destination that goes with its cluster IP is served, then silent, and never
// refused in between.
func TestChangeGivesNoThirdAnswer(t *testing.T) {
	lab := netns.NewLab(t, 0)
	front := steering.NewFront(t, lab.Node, "a")
	r := newRedirector(t, lab.Node)
	defer r.Close()
	d := service.Destination{Addr: netip.MustParseAddr("fd01::1"), Port: 80, Protocol: service.TCP}
	without := steering.Plan()
	without.Local = redirect.LocalOf(netip.MustParsePrefix("fd01::/64"))
	with := without
	with.ClusterIPs = with.ClusterIPs.With(d.Addr, struct{}{})
	with.Steer = with.Steer.With(d, front.Target(d))
	must.OK(t, r.Apply(with))
	program := r.tables.program
	var stop atomic.Bool
	changed := make(chan error)
	go func() {
		var err error
		for !stop.Load() && err == nil {
			err = errors.Join(r.Apply(without), r.Apply(with))
		}
		changed <- err
	}()
	for answer := range 20_000 {
		if got := ask(t, program, d); !strings.HasPrefix(got, "socket ") {
			t.Errorf("answer %d: %s", answer, got)
			break
		}
	}
	stop.Store(true)
	must.OK(t, <-changed)
}

// BenchmarkProgram10kServices is what a lookup costs, with 10,000 services.
func BenchmarkProgram10kServices(b *testing.B) {
	lab := netns.NewLab(b, 0)
	front := steering.NewFront(b, lab.Node, "front")
	r := newRedirector(b, lab.Node)
	defer r.Close()
	must.OK(b, r.Apply(bigPlan(front, 10000)))
	for _, c := range []struct{ name, to string }{
		{"served", "10.96.0.10:80"}, {"unknown port", "10.96.0.10:81"}, {"the host's", "10.1.0.1:80"}, {"served, IPv6", "[fd01::10]:80"},
	} {
		b.Run(c.name, func(b *testing.B) {
			at := netip.MustParseAddrPort(c.to)
			d := service.Destination{Addr: at.Addr(), Port: at.Port(), Protocol: service.TCP}
			ask(b, r.tables.program, d)
			in := make([]byte, 72)
			binary.NativeEndian.PutUint32(in[ctxFamily:], syscall.AF_INET)
			binary.NativeEndian.PutUint32(in[ctxProtocol:], syscall.IPPROTO_TCP)
			binary.NativeEndian.PutUint32(in[ctxLocalPort:], uint32(d.Port))
			in[16], in[20] = 10, 0xfd
			binary.BigEndian.PutUint16(in[36:], 40000)
			if d.Addr.Is4() {
				a := d.Addr.As4()
				copy(in[ctxLocalIPv4:], a[:])
			} else {
				binary.NativeEndian.PutUint32(in[ctxFamily:], syscall.AF_INET6)
				a := d.Addr.As16()
				copy(in[ctxLocalIPv6:], a[:])
			}
			for b.Loop() {
				must.OK(b, must.Err(r.tables.program.Run(&ebpf.RunOptions{Context: in, Repeat: 1000})))
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1000, "ns/lookup")
		})
	}
}

func TestPatiently(t *testing.T) {
	for _, c := range []struct {
		errs []error
		want error
	}{
		{[]error{nil}, nil},
		{[]error{syscall.ENOMEM, syscall.ENOMEM, nil}, nil},
		{[]error{syscall.ENOMEM, syscall.E2BIG}, syscall.E2BIG},
	} {
		calls := 0
		err := patiently(func() error { calls++; return c.errs[calls-1] })
		if !errors.Is(err, c.want) || calls != len(c.errs) {
			t.Errorf("%v: got %v after %d calls", c.errs, err, calls)
		}
	}
}
