package balancer

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// counted returns a balancer of an algorithm whose connections somebody counts.
func counted(a Algorithm) (*Balancer, *Loads) {
	loads := &Loads{}
	return New(Options{Algorithm: a, Loads: loads, Seed: 7}), loads
}

// weighted gives endpoints weights.
func weighted(list []service.Endpoint, weights ...uint16) []service.Endpoint {
	for i := range list {
		list[i].Weight = weights[i%len(weights)]
	}
	return list
}

// model is the slow, obvious form of the algorithms that compare connections. It returns
// the candidates that are equally good.
func (a byLoad) model(open []int, list []service.Endpoint) (best []int) {
	cost := func(i int) float64 {
		weight := 1.0
		if a.weighted && list[i].Weight > 0 {
			weight = float64(list[i].Weight)
		}
		if a.idle && open[i] == 0 {
			return 0
		}
		return (float64(open[i]) + float64(a.extra)) / weight
	}
	least := cost(0)
	for i := range list {
		least = min(least, cost(i))
	}
	for i := range list {
		if cost(i) <= least*(1+1e-12) {
			best = append(best, i)
		}
	}
	return best
}

// TestLeastLoadedAgreesWithTheModel opens and closes connections at random. Each goes to an
// endpoint that the model has among the best.
func TestLeastLoadedAgreesWithTheModel(t *testing.T) {
	for _, a := range []Algorithm{LeastConnections, WeightedLeastConnections, ShortestExpectedDelay, NeverQueue} {
		r := rand.New(rand.NewPCG(3, uint64(a)))
		b, loads := counted(a)
		list := weighted(endpoints(7), 1, 5, 2, 1, 0, 9, 3)
		open := make([]int, len(list))
		var begun []int
		for step := range 20000 {
			if len(begun) > 0 && r.IntN(100) < 48 {
				at := r.IntN(len(begun))
				i := begun[at]
				begun = slices.Delete(begun, at, at+1)
				loads.Of(list[i].Addr).End()
				open[i]--
				continue
			}
			i, _ := first(t, b, list, client(step%500), 0)
			if want := algorithms[a].chooser.(byLoad).model(open, list); !slices.Contains(want, i) {
				t.Fatalf("%v, step %d: endpoint %d of %v, want one of %v", a, step, i, open, want)
			}
			loads.Of(list[i].Addr).Begin()
			open[i]++
			begun = append(begun, i)
		}
	}
}

// TestLeastConnectionsSharesEqually: equal endpoints get equal shares, also where no
// connection lasts.
func TestLeastConnectionsSharesEqually(t *testing.T) {
	b, _ := counted(LeastConnections)
	list, got := endpoints(10), make([]int, 10)
	for range 10000 {
		i, _ := first(t, b, list, someone, 0)
		got[i]++
	}
	if low := slices.Min(got); low < 850 {
		t.Errorf("of 10000 connections that end at once, endpoints get %v", got)
	}
}

// TestPowerOfTwoAvoidsTheFull: of two, the one with fewer connections; of equal ones, the
// one that answers sooner.
func TestPowerOfTwoAvoidsTheFull(t *testing.T) {
	b, loads := counted(PowerOfTwo)
	list, got := endpoints(2), [2]int{}
	loads.Of(list[0].Addr).Begin()
	for range 100 {
		i, _ := first(t, b, list, someone, 0)
		got[i]++
	}
	check.Equalf(t, got, [2]int{0, 100}, "new connections of the endpoint that has one, and of the other")
	loads.Of(list[0].Addr).End()
	loads.Answered(loads.Of(list[0].Addr), time.Millisecond, 0)
	loads.Answered(loads.Of(list[1].Addr), 5*time.Millisecond, 0)
	got = [2]int{}
	for range 100 {
		i, _ := first(t, b, list, someone, 0)
		got[i]++
	}
	check.Equalf(t, got, [2]int{100, 0}, "connections of the endpoint that answers first, and of the later one")
}

// TestPowerOfTwoEvensOut: with 4 endpoints of which one serves ten times as slowly, that one
// has a small share of the connections.
func TestPowerOfTwoEvensOut(t *testing.T) {
	share := func(a Algorithm) float64 {
		b, loads := counted(a)
		list := endpoints(4)
		type end struct{ at, endpoint int }
		var open []end
		slow := 0
		for now := range 20000 { // a connection comes at each step
			open = slices.DeleteFunc(open, func(e end) bool {
				if e.at <= now {
					loads.Of(list[e.endpoint].Addr).End()
				}
				return e.at <= now
			})
			i, _ := first(t, b, list, someone, 0)
			loads.Of(list[i].Addr).Begin()
			lasts := 10
			if i == 0 {
				lasts, slow = 100, slow+1
			}
			open = append(open, end{now + lasts, i})
		}
		return float64(slow) / 20000
	}
	for _, a := range []Algorithm{LeastConnections, PowerOfTwo} {
		if got, even := share(a), share(RoundRobin); got > 0.10 || even < 0.24 {
			t.Errorf("%v: the slow endpoint of four gets %.3f of the connections, with round-robin %.3f", a, got, even)
		}
	}
}

// TestSuspectsAreLeftOut: an endpoint that does not answer has no connections, and gets no
// more for it.
func TestSuspectsAreLeftOut(t *testing.T) {
	for _, a := range []Algorithm{LeastConnections, PowerOfTwo, ShortestExpectedDelay, NeverQueue, WeightedLeastConnections} {
		b, loads := counted(a)
		list := endpoints(3)
		var d Dial
		d.begin(endpointKey(list[1].Addr), 0)
		b.Failed(&d, list[1].Addr, someone, 0)
		for range 50 {
			i, _ := first(t, b, list, someone, ms)
			if i == 1 {
				t.Fatalf("%v: a connection goes to the endpoint that has just failed", a)
			}
			loads.Of(list[i].Addr).Begin()
		}
	}
}

// TestHashesNameTheSameEndpoint: on each node, for each connection of a client.
func TestHashesNameTheSameEndpoint(t *testing.T) {
	list := endpoints(10)
	for _, a := range []Algorithm{SourceHash, Maglev} {
		one, other := New(Options{Algorithm: a}), New(Options{Algorithm: a})
		others, at, used := slices.Clone(list), map[int]int{}, map[int]int{}
		for c := range 2000 { // the other node meets them in another order
			at[1999-c], _ = first(t, other, others, client(1999-c), 0)
		}
		for c := range 2000 {
			i, _ := first(t, one, list, client(c), 0)
			j := at[c]
			again, _, _ := one.Next(&Dial{}, list, Conn{Client: netip.AddrPortFrom(client(c), 5), Destination: netip.MustParseAddrPort("10.96.0.9:1")}, 0)
			if i != j || i != again {
				t.Fatalf("%v: client %d goes to %d, %d and %d", a, c, i, j, again)
			}
			used[i]++
		}
		for i := range list {
			if used[i] < 140 || used[i] > 270 {
				t.Errorf("%v: endpoint %d has %d of 2000 clients", a, i, used[i])
			}
		}
	}
	b := New(Options{Algorithm: DestinationHash})
	i, _ := first(t, b, list, client(1), 0)
	for c := range 100 {
		if j, _ := first(t, b, list, client(c), 0); j != i {
			t.Fatalf("two connections to one address go to %d and %d", i, j)
		}
	}
	vips := map[int]bool{}
	for v := range 200 {
		j, _, _ := b.Next(&Dial{}, list, Conn{Destination: netip.AddrPortFrom(client(v), 80)}, 0)
		vips[j] = true
	}
	check.Equalf(t, len(vips), len(list), "endpoints that 200 addresses lead to")
}

// TestHashOfThePort: with it, the connections of a client are spread.
func TestHashOfThePort(t *testing.T) {
	list := endpoints(10)
	for _, a := range []Algorithm{SourceHash, Maglev} {
		b, used := New(Options{Algorithm: a, HashPort: true}), map[int]bool{}
		for port := range uint16(500) {
			i, _, _ := b.Next(&Dial{}, list, Conn{Client: netip.AddrPortFrom(someone, port+1)}, 0)
			again, _, _ := b.Next(&Dial{}, list, Conn{Client: netip.AddrPortFrom(someone, port+1)}, 0)
			must.Equalf(t, again, i, "%v: the endpoint of port %d", a, port)
			used[i] = true
		}
		check.Equalf(t, len(used), len(list), "%v: endpoints that 500 ports of one client lead to", a)
	}
}

// TestMaglevMovesFewClients: when one endpoint of 100 goes or another one comes, at most 2 %
// of the clients move that need not.
func TestMaglevMovesFewClients(t *testing.T) {
	const clients = 20000
	all := endpoints(101)
	place := func(list []service.Endpoint) (at []netip.AddrPort) {
		b := New(Options{Algorithm: Maglev})
		for c := range clients {
			i, _ := first(t, b, list, client(c), 0)
			at = append(at, list[i].Addr)
		}
		return at
	}
	before := place(all[:100])
	for _, tt := range []struct {
		name string
		list []service.Endpoint
	}{
		{"one goes", slices.Delete(slices.Clone(all[:100]), 37, 38)},
		{"one comes", all},
		{"one is replaced", append(slices.Delete(slices.Clone(all[:100]), 37, 38), all[100])},
	} {
		after, moved := place(tt.list), 0
		for c := range clients {
			need := before[c] == all[37].Addr && tt.name != "one comes" || after[c] == all[100].Addr
			if before[c] != after[c] && !need {
				moved++
			}
		}
		t.Logf("%s: %.2f %% of the clients move that need not", tt.name, 100*float64(moved)/clients)
		if moved > clients*2/100 {
			t.Errorf("%s: %d of %d clients move that need not", tt.name, moved, clients)
		}
	}
}

// TestMaglevSharesEqually: places differ by one at most, for any number of endpoints.
func TestMaglevSharesEqually(t *testing.T) {
	for _, n := range []int{1, 2, 3, 10, 1000, 16381, 20000} {
		var list []service.Endpoint
		for i := range n {
			list = append(list, service.Endpoint{Addr: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 80)})
		}
		got := make([]int, n)
		for _, i := range maglevTable(list) {
			got[i]++
		}
		counted := got[:min(n, maglevSize)]
		if low, high := slices.Min(counted), slices.Max(counted); high-low > 1 {
			t.Errorf("%d endpoints have %d to %d places", n, low, high)
		}
	}
}

// TestWeightedRoundRobin: in a round of as many connections as the weights' sum, each
// endpoint has as many as its weight, and none of two equal ones has three in a row.
func TestWeightedRoundRobin(t *testing.T) {
	for _, weights := range [][]uint16{{1}, {1, 1}, {5, 1, 1}, {3, 2}, {100, 1, 50}, {65535, 1}, {0, 2}} {
		list := weighted(endpoints(len(weights)), weights...)
		b, sum := New(Options{Algorithm: WeightedRoundRobin}), 0
		for _, w := range weights {
			sum += int(max(w, 1))
		}
		got := make([]int, len(list))
		run, last, longest := 0, -1, 0
		for range sum {
			i, _ := first(t, b, list, someone, 0)
			got[i]++
			if run++; i != last {
				run = 1
			}
			last, longest = i, max(longest, run)
		}
		for i, w := range weights {
			check.Equalf(t, got[i], int(max(w, 1)), "weights %v: connections of endpoint %d, of %d", weights, i, sum)
		}
		if slices.Equal(weights, []uint16{3, 2}) && longest > 2 {
			t.Errorf("weights %v: %d connections in a row", weights, longest)
		}
	}
}

// TestChangeOfTheAlgorithm: it holds from the next connection on.
func TestChangeOfTheAlgorithm(t *testing.T) {
	loads := &Loads{}
	b, list := New(Options{Loads: loads}), endpoints(4)
	for i := range 3 {
		loads.Of(list[i].Addr).Begin()
	}
	b.Configure(Options{Algorithm: LeastConnections, Loads: loads})
	for range 20 {
		if i, _ := first(t, b, list, someone, 0); i != 3 {
			t.Fatalf("a connection goes to endpoint %d, and only 3 has none", i)
		}
	}
	b.Configure(Options{Algorithm: SourceHash, Loads: loads})
	i, _ := first(t, b, list, someone, 0)
	if j, _ := first(t, b, list, someone, 0); i != j {
		t.Errorf("a client goes to %d and %d", i, j)
	}
}

// TestAnnotations: ours comes first, then those of others; what is not known is named and
// leaves the default.
func TestAnnotations(t *testing.T) {
	const cilium, router = "service.cilium.io/lb-algorithm", "kube-router.io/service.scheduler"
	for _, tt := range []struct {
		annotations map[string]string
		want        Algorithm
		port        bool
		problem     string
	}{
		{nil, Random, false, ""},
		{map[string]string{"balancer": "lc"}, LeastConnections, false, ""},
		{map[string]string{cilium: "maglev"}, Maglev, false, ""},
		{map[string]string{router: "sed"}, ShortestExpectedDelay, false, ""},
		{map[string]string{"balancer": "rr", cilium: "maglev"}, RoundRobin, false, ""},
		{map[string]string{router: "lblc"}, Random, false, "annotation " + router + `: balancer "lblc": unknown`},
		{map[string]string{"balancer": "mh", "balancer-hash": "client-port"}, Maglev, true, ""},
		{map[string]string{"dial-timeouts": "1s,x"}, Random, false, `annotation sluice.dev/dial-timeouts: "1s,x" is not a list`},
		{map[string]string{"balancer-hash": "port"}, Random, false, `annotation sluice.dev/balancer-hash "port": unknown`},
	} {
		got, err := Options{Algorithm: Random}.For(&service.Port{Annotations: tt.annotations})
		if got.Algorithm != tt.want || got.HashPort != tt.port || (err != nil) != (tt.problem != "") {
			t.Errorf("%v: %v, port %v, %v", tt.annotations, got.Algorithm, got.HashPort, err)
		}
		if err != nil && !hasPrefix(err, tt.problem) {
			t.Errorf("%v: %v, want %s", tt.annotations, err, tt.problem)
		}
	}
}

// TestRebalanceInVain: where all clients get the same endpoint, the annotation has no effect, and
// that is told.
func TestRebalanceInVain(t *testing.T) {
	for annotations, want := range map[string]string{
		"rr": "", "lc": "", "maglev client-port": "", "sh": "", "mh": "",
		"dh": "destination-hash", "dh client-port": "destination-hash",
	} {
		port := &service.Port{Rebalance: time.Second, Annotations: map[string]string{}}
		name, hash, has := strings.Cut(annotations, " ")
		if port.Annotations["balancer"] = name; has {
			port.Annotations["balancer-hash"] = hash
		}
		options, err := Options{}.For(port)
		if options.Algorithm.SpreadsClients() != (want == "") || (err != nil) != (want != "") || err != nil && !hasPrefix(err, "annotation sluice.dev/rebalance: "+want+" gives all clients the same endpoint") {
			t.Errorf("%s: %v, %v", annotations, options.Algorithm.SpreadsClients(), err)
		}
	}
}

func hasPrefix(err error, text string) bool {
	got := err.Error()
	return len(got) >= len(text) && got[:len(text)] == text
}

// TestLoadsForget: endpoints that are gone leave, those with connections and listed ones
// stay, with their counts.
func TestLoadsForget(t *testing.T) {
	var loads Loads
	gone := endpoints(5000)
	for i := range gone {
		loads.Of(gone[i].Addr)
	}
	busy := loads.Of(gone[4321].Addr)
	busy.Begin()
	port := &service.Port{}
	port.Families[0].Endpoints = gone[:3]
	listed := loads.Of(gone[2].Addr)
	b := New(Options{Algorithm: LeastConnections, Loads: &loads})
	if i, _ := first(t, b, gone[4320:4322], someone, 0); i != 0 {
		t.Errorf("the choice is %d, and 1 has a connection", i)
	}
	b.Configure(Options{Algorithm: LeastConnections, Loads: &loads, Port: port})
	if loads.used > 3+1+64 {
		t.Errorf("%d endpoints are known still", loads.used)
	}
	if loads.Of(gone[4321].Addr) != busy || busy.Open() != 1 || loads.Of(gone[2].Addr) != listed {
		t.Error("an endpoint that counts was forgotten")
	}
	if i, _ := first(t, b, gone[4320:4322], someone, 0); i != 0 {
		t.Errorf("the choice is %d afterwards, and 1 has a connection", i)
	}
}

// TestLoadsKeepWhatIsBusy: a Service may have more endpoints with connections than listed
// ones.
func TestLoadsKeepWhatIsBusy(t *testing.T) {
	var loads Loads
	busy := endpoints(5000)
	for i := range busy {
		loads.Of(busy[i].Addr).Begin()
	}
	loads.forget(&service.Port{})
	for i := range busy {
		must.Equalf(t, loads.Of(busy[i].Addr).Open(), 1, "endpoint %d has connections", i)
	}
	check.Equalf(t, loads.Of(endpoints6(1)[0].Addr).Open(), 0, "connections of a new endpoint")
}

func TestChoosingAllocatesNothing(t *testing.T) {
	list := endpoints(1000)
	for a := range algorithms {
		b, _ := counted(Algorithm(a))
		var d Dial
		b.Next(&d, list, conn(someone), 0)
		if n := testing.AllocsPerRun(100, func() {
			var d Dial
			b.Next(&d, list, conn(someone), 0)
		}); n > 0 {
			t.Errorf("%v: %.0f allocations for a choice", Algorithm(a), n)
		}
	}
}

// BenchmarkChoose is the first attempt of a connection, with 1,000 endpoints.
func BenchmarkChoose(bench *testing.B) {
	for a := range algorithms {
		bench.Run(fmt.Sprintf("%v/endpoints=1000", Algorithm(a)), func(bench *testing.B) {
			list := endpoints(1000)
			b, loads := counted(Algorithm(a))
			from := conn(someone)
			for i := range list { // none is without connections: all are compared
				loads.Of(list[i].Addr).Begin()
			}
			for bench.Loop() {
				var d Dial
				b.Next(&d, list, from, 0)
			}
		})
	}
}
