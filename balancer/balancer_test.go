package balancer

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

const ms = int64(time.Millisecond)

var someone = netip.MustParseAddr("10.0.0.9")

// endpoints returns n endpoints, 10.1.0.1:80 and following.
func endpoints(n int) []service.Endpoint {
	list := make([]service.Endpoint, n)
	for i := range list {
		list[i].Addr = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), 80)
	}
	return list
}

// endpoints6 returns n IPv6 endpoints that differ in the low bits only.
func endpoints6(n int) []service.Endpoint {
	list := make([]service.Endpoint, n)
	for i := range list {
		a := [16]byte{0: 0xfd, 14: byte(i >> 8), 15: byte(i)}
		list[i].Addr = netip.AddrPortFrom(netip.AddrFrom16(a), 80)
	}
	return list
}

// conn is a connection of a client.
func conn(client netip.Addr) Conn {
	return Conn{Client: netip.AddrPortFrom(client, 40000), Destination: netip.MustParseAddrPort("10.96.0.1:80")}
}

func client(i int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
}

// first returns the index that a new connection's first attempt gets.
func first(t *testing.T, b *Balancer, candidates []service.Endpoint, who netip.Addr, now int64) (int, Affinity) {
	t.Helper()
	var d Dial
	i, _, ok := b.Next(&d, candidates, conn(who), now)
	if !ok {
		t.Fatal("no candidate proposed")
	}
	return i, d.Affinity()
}

func TestParse(t *testing.T) {
	const available = "(available: round-robin, rr, random, least-connections, lc, power-of-two, p2c, source-hash, sh, destination-hash, dh, " +
		"shortest-expected-delay, sed, never-queue, nq, maglev, mh, weighted-round-robin, wrr, weighted-least-connections, wlc)"
	for _, tt := range []struct {
		name string
		want Algorithm
		err  string
	}{
		{"round-robin", RoundRobin, ""},
		{"rr", RoundRobin, ""},
		{"random", Random, ""},
		{"lc", LeastConnections, ""}, {"least-connections", LeastConnections, ""}, {"p2c", PowerOfTwo, ""},
		{"sh", SourceHash, ""}, {"dh", DestinationHash, ""}, {"sed", ShortestExpectedDelay, ""}, {"nq", NeverQueue, ""},
		{"mh", Maglev, ""}, {"maglev", Maglev, ""}, {"wrr", WeightedRoundRobin, ""}, {"wlc", WeightedLeastConnections, ""},
		{"lblc", 0, `balancer "lblc": unknown ` + available},
		{"Random", 0, `balancer "Random": unknown ` + available},
		{"", 0, `balancer "": unknown ` + available},
	} {
		got, err := Parse(tt.name)
		if text := fmt.Sprint(err); got != tt.want || (tt.err == "") != (err == nil) || err != nil && text != tt.err {
			t.Errorf("Parse(%q) = %v, %v; want %v, %s", tt.name, got, err, tt.want, tt.err)
		}
	}
	for i := range algorithms {
		a := Algorithm(i)
		if got, err := Parse(a.String()); err != nil || got != a {
			t.Errorf("Parse(%q) = %v, %v", a, got, err)
		}
	}
}

func TestRoundRobinTakesTurns(t *testing.T) {
	for _, n := range []int{1, 2, 3, 7, 100} {
		b := New(Options{})
		list := endpoints(n)
		at, _ := first(t, b, list, someone, 0)
		for k := range 3 * n {
			got, _ := first(t, b, list, someone, 0)
			must.Equalf(t, got, (at+k+1)%n, "n=%d: connection %d went to", n, k+1)
		}
	}
}

// Each list has its own turn: a service that serves both families alternately
// still spreads evenly over each family's endpoints.
func TestRoundRobinListsUsedAlternately(t *testing.T) {
	for _, lists := range [][][]service.Endpoint{
		{endpoints(2), endpoints6(2)},
		{endpoints(4), endpoints(4)[:2]}, // cluster and local
		{endpoints(6), endpoints(6)[3:], endpoints6(4)},
	} {
		b := New(Options{Seed: 7})
		hits := make([][]int, len(lists))
		for i, l := range lists {
			hits[i] = make([]int, len(l))
		}
		const rounds = 120
		for range rounds {
			for i, l := range lists {
				at, _ := first(t, b, l, someone, 0)
				hits[i][at]++
			}
		}
		for i, l := range lists {
			for at, n := range hits[i] {
				check.Equalf(t, n, rounds/len(l), "list %d of %d: turns of endpoint %d", i, len(lists), at)
			}
		}
	}
}

// chiBound is the value that chi-square exceeds once in a million times (by
// the approximation of Wilson and Hilferty).
func chiBound(degrees int) float64 {
	k := float64(degrees)
	x := 1 - 2/(9*k) + 4.75*math.Sqrt(2/(9*k))
	return k * x * x * x
}

// uniform fails unless the counts look like even chances.
func uniform(t *testing.T, what string, counts []int) {
	t.Helper()
	if chi := chiSquare(counts); chi > chiBound(len(counts)-1) {
		t.Errorf("%s: chi-square %.1f exceeds %.1f: %v", what, chi, chiBound(len(counts)-1), counts)
	}
}

func chiSquare(counts []int) float64 {
	total := 0
	for _, c := range counts {
		total += c
	}
	want := float64(total) / float64(len(counts))
	chi := 0.0
	for _, c := range counts {
		chi += (float64(c) - want) * (float64(c) - want) / want
	}
	return chi
}

// The bound must tell a bias of a fifth from chance, else the tests that use it
// could not fail.
func TestChiSquareBoundCanFail(t *testing.T) {
	counts := []int{2000, 2000, 2000, 2000, 2400}
	if chi := chiSquare(counts); chi <= chiBound(4) {
		t.Errorf("chi-square of %v is %.1f, within %.1f", counts, chi, chiBound(4))
	}
	r := rand.New(rand.NewPCG(1, 2))
	fair := make([]int, 5)
	for range 10000 {
		fair[r.IntN(5)]++
	}
	uniform(t, "a fair die", fair)
}

// TestRandomIsUniform shows A3.14.
func TestRandomIsUniform(t *testing.T) {
	for _, n := range []int{2, 3, 5, 64} {
		b := New(Options{Algorithm: Random, Seed: uint64(n)})
		counts := make([]int, n)
		list := endpoints(n)
		for range 1000 * n {
			at, _ := first(t, b, list, someone, 0)
			counts[at]++
		}
		uniform(t, fmt.Sprintf("random of %d", n), counts)
	}
}

// Many nodes start at about the same time; they must not all begin with the
// same endpoint.
func TestRoundRobinStartsAtARandomPlace(t *testing.T) {
	list := endpoints(5)
	counts := make([]int, 5)
	for seed := range 5000 {
		b := New(Options{Seed: uint64(seed) + 1})
		at, _ := first(t, b, list, someone, 0)
		counts[at]++
	}
	uniform(t, "first place by seed", counts)

	counts = make([]int, 5)
	for range 5000 {
		at, _ := first(t, New(Options{}), list, someone, 0)
		counts[at]++
	}
	uniform(t, "first place without a seed", counts)
}

// A list that changes after every few connections must not favour its first
// endpoints.
func TestRoundRobinIsUniformWhileTheListChanges(t *testing.T) {
	for _, every := range []int{1, 2, 3, 4} {
		b := New(Options{Seed: 99})
		all := endpoints(9)
		r := rand.New(rand.NewPCG(3, uint64(every)))
		counts := make([]int, 4)
		for range 12000 / every {
			// Four endpoints stay, the others come and go.
			list := append([]service.Endpoint(nil), all[:4]...)
			for _, ep := range all[4:] {
				if r.IntN(2) == 0 {
					list = append(list, ep)
				}
			}
			for range every {
				if at, _ := first(t, b, list, someone, 0); at < 4 {
					counts[at]++
				}
			}
		}
		uniform(t, fmt.Sprintf("a change every %d connections", every), counts)
	}
}

// The connections that meet a dead endpoint are spread over the others.
func TestRetriesAreSpreadEvenly(t *testing.T) {
	for _, algorithm := range []Algorithm{RoundRobin, Random} {
		for _, n := range []int{3, 4, 5} {
			b := New(Options{Algorithm: algorithm, Seed: 11})
			list := endpoints(n)
			counts := make([]int, n)
			for range 3000 * n {
				var d Dial
				for {
					i, _, ok := b.Next(&d, list, conn(someone), 0)
					if !ok {
						t.Fatal("gave up with a live candidate")
					}
					if i != 0 { // the first one is dead
						counts[i]++
						break
					}
				}
			}
			uniform(t, fmt.Sprintf("%v, the first of %d dead", algorithm, n), counts[1:])
		}
	}
}

func TestNoCandidates(t *testing.T) {
	var d Dial
	if _, _, ok := New(Options{}).Next(&d, nil, conn(someone), 0); ok || d.Attempts() != 0 {
		t.Errorf("no candidates: ok=%v, %d attempts", ok, d.Attempts())
	}
}

func TestSizes(t *testing.T) {
	if got := unsafe.Sizeof(Dial{}); got > 64 {
		t.Errorf("Dial takes %d bytes in each connection, want at most 64", got)
	}
	if got := unsafe.Sizeof(pin{}); got > 56 {
		t.Errorf("a pin takes %d bytes, want at most 56", got)
	}
}

func TestEndpointKeys(t *testing.T) {
	seen := make(map[uint64]netip.AddrPort)
	add := func(ap netip.AddrPort) {
		key := endpointKey(ap)
		if key == 0 || key&stateMask != 0 {
			t.Fatalf("key of %v is %#x", ap, key)
		}
		if other, ok := seen[key]; ok {
			t.Fatalf("%v and %v have one key", ap, other)
		}
		seen[key] = ap
	}
	for _, list := range [][]service.Endpoint{endpoints(5000), endpoints6(5000)} {
		for _, ep := range list {
			add(ep.Addr)
			add(netip.AddrPortFrom(ep.Addr.Addr(), 81))
			add(netip.AddrPortFrom(ep.Addr.Addr(), 65535))
		}
	}
	add(netip.MustParseAddrPort("0.0.0.0:0"))
	add(netip.MustParseAddrPort("255.255.255.255:65534"))
	add(netip.MustParseAddrPort("[::]:0"))
}

func BenchmarkNext(b *testing.B) {
	for _, bench := range []struct {
		name string
		opts Options
		list []service.Endpoint
	}{
		{"rr/endpoints=3", Options{}, endpoints(3)},
		{"rr/endpoints=1000", Options{}, endpoints(1000)},
		{"rr6/endpoints=1000", Options{}, endpoints6(1000)},
		{"random/endpoints=1000", Options{Algorithm: Random}, endpoints(1000)},
		{"affinity-hit/endpoints=3", Options{AffinityTimeout: time.Hour}, endpoints(3)},
		{"affinity-hit/endpoints=1000", Options{AffinityTimeout: time.Hour}, endpoints(1000)},
	} {
		b.Run(bench.name, func(b *testing.B) {
			lb := New(bench.opts)
			clients := make([]netip.Addr, 4096)
			for i := range clients {
				clients[i] = client(i)
				var d Dial
				lb.Next(&d, bench.list, conn(clients[i]), 0)
			}
			b.ReportAllocs()
			k := 0
			for b.Loop() {
				var d Dial
				who := clients[k&4095]
				k++
				i, _, _ := lb.Next(&d, bench.list, conn(who), int64(k))
				lb.Connected(&d, bench.list[i].Addr, who, int64(k))
			}
		})
	}
}

// A connection that meets dead endpoints before one that answers.
func BenchmarkNextRetry(b *testing.B) {
	for _, dead := range []int{1, 3, 10, 100} {
		b.Run(fmt.Sprintf("dead=%d", dead), func(b *testing.B) {
			lb := New(Options{})
			list := endpoints(dead + 1)
			b.ReportAllocs()
			for now := int64(0); b.Loop(); now += int64(time.Minute) {
				var d Dial
				for range dead + 1 {
					i, _, _ := lb.Next(&d, list, conn(someone), now)
					lb.Failed(&d, list[i].Addr, someone, now)
				}
			}
		})
	}
}

// New clients on a full table: each evicts another one.
func BenchmarkAffinityEvict(b *testing.B) {
	lb := New(Options{AffinityTimeout: time.Hour})
	list := endpoints(3)
	b.ReportAllocs()
	k := 0
	for b.Loop() {
		var d Dial
		lb.Next(&d, list, conn(netip.AddrFrom4([4]byte{10, byte(k >> 16), byte(k >> 8), byte(k)})), int64(k))
		k++
	}
}
