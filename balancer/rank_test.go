package balancer

import (
	"fmt"
	"math/big"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
)

var clusterRange = []netip.Prefix{netip.MustParsePrefix("fd00::/32"), netip.MustParsePrefix("10.128.0.0/9")}

// ranked returns the balancer of a service port on the node with the given number, whose
// pod range has that index in 10.128.0.0/9. cluster is what the node knows of that.
func ranked(name string, node int, cluster []netip.Prefix) *Balancer {
	r := &Rank{}
	r.Set(fmt.Sprint("node-", node), []netip.Prefix{netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(128 + node>>8), byte(node), 0}), 24)}, cluster)
	opts, _ := Options{Rank: r}.For(&service.Port{Name: service.PortName{Name: service.Name{Namespace: "default", Name: name}}})
	return New(opts)
}

// fullest opens connections on some nodes, and returns the connections of the fullest
// endpoint over the mean.
func fullest(t *testing.T, nodes []int, cluster []netip.Prefix, list []service.Endpoint, each int) float64 {
	t.Helper()
	counts := make([]int, len(list))
	most := 0
	for _, node := range nodes {
		b := ranked("web", node, cluster)
		for range each {
			i, _ := first(t, b, list, someone, 0)
			counts[i]++
			most = max(most, counts[i])
		}
	}
	return float64(most*len(list)) / float64(len(nodes)*each)
}

// TestNodesSpreadFewConnections: nodes that each open one connection, or a few, use all
// endpoints evenly, also where a tenth of the ranges is unused and where one zone of three
// has the clients.
func TestNodesSpreadFewConnections(t *testing.T) {
	everyNth := func(n, step int) (nodes []int) {
		for i := range n {
			nodes = append(nodes, i*step)
		}
		return nodes
	}
	holes := func(n int) (nodes []int) {
		r := rand.New(rand.NewPCG(1, 2))
		for i := 0; len(nodes) < n; i++ {
			if r.IntN(10) > 0 {
				nodes = append(nodes, i)
			}
		}
		return nodes
	}
	for _, tt := range []struct {
		name      string
		nodes     []int
		endpoints []service.Endpoint
		each      int
		most      float64
	}{
		{"50 nodes, 10 endpoints", everyNth(50, 1), endpoints(10), 1, 1},
		{"50 nodes, 10 endpoints of IPv6", everyNth(50, 1), endpoints6(10), 1, 1},
		{"50 nodes, 10 endpoints, 3 each", everyNth(50, 1), endpoints(10), 3, 1},
		{"5,000 nodes, 100 endpoints", everyNth(5000, 1), endpoints(100), 1, 1},
		{"5,000 nodes with holes, 100 endpoints", holes(5000), endpoints(100), 1, 1.12},
		{"every third node, 9 endpoints", everyNth(300, 3), endpoints(9), 1, 1.1},
		{"every second node, 2 endpoints", everyNth(100, 2), endpoints(2), 1, 1.1},
	} {
		got := fullest(t, tt.nodes, clusterRange, tt.endpoints, tt.each)
		if got > tt.most {
			t.Errorf("%s: the fullest endpoint has %.2f of the mean, want at most %.2f", tt.name, got, tt.most)
		}
		mean := float64(len(tt.nodes)*tt.each) / float64(len(tt.endpoints))
		unknown, most := fullest(t, tt.nodes, nil, tt.endpoints, tt.each), tt.most+float64(tt.each)/mean
		if unknown > most {
			t.Errorf("%s, without the cluster's range: the fullest endpoint has %.2f of the mean, want at most %.2f", tt.name, unknown, most)
		}
		t.Logf("%s: %.2f, without the cluster's range %.2f", tt.name, got, unknown)
	}
}

// TestServicesBeginAtDifferentEndpoints: a node does not prefer one endpoint for all
// Services.
func TestServicesBeginAtDifferentEndpoints(t *testing.T) {
	list, begun := endpoints(10), map[int]int{}
	for i := range 1000 {
		at, _ := first(t, ranked(fmt.Sprint("service-", i), 7, clusterRange), list, someone, 0)
		begun[at]++
	}
	for i := range list {
		if begun[i] < 50 || begun[i] > 160 {
			t.Errorf("%d of 1000 Services begin at endpoint %d, want about 100", begun[i], i)
		}
	}
}

// TestRankedRoundRobinTakesTurns: with a rank, each candidate still has its turn once in
// a round, and Turns tells the same order.
func TestRankedRoundRobinTakesTurns(t *testing.T) {
	for _, n := range []int{1, 2, 3, 16, 1000} {
		b, list := ranked("web", 123, clusterRange), endpoints(n)
		ordered, start := b.Turns(nil, list)
		for k := range 3 * n {
			i, _ := first(t, b, list, someone, 0)
			if want := ordered[(int(start)+k)%n]; list[i].Addr != want {
				t.Fatalf("%d candidates: turn %d is %v, Turns says %v", n, k, list[i].Addr, want)
			}
		}
	}
}

func TestRangeIndex(t *testing.T) {
	for _, tt := range []struct {
		cidr string
		want uint32
	}{
		{"10.244.3.0/24", 0x0af403}, {"10.244.4.0/24", 0x0af404}, {"10.244.3.64/26", 0x0af403<<2 | 1},
		{"0.0.0.0/0", 0}, {"fd00:10:244:3::/64", 0x02440003}, {"fd00:10:244:4::/64", 0x02440004},
		{"fd00::3:0/112", 3}, {"fd00::4:0/112", 4}, {"fd00::1/128", 1},
	} {
		check.Equalf(t, rangeIndex(netip.MustParsePrefix(tt.cidr)), tt.want, "rangeIndex(%s)", tt.cidr)
	}
}

// TestRankIsUnknown: without a node, the balancer begins at random, as it does without a
// Rank; a name alone gives a rank.
func TestRankIsUnknown(t *testing.T) {
	r := &Rank{}
	r.Set("", nil, nil)
	if _, ok := r.start(3); ok {
		t.Error("a node that nobody knows has a rank")
	}
	r.Set("node-a", nil, nil)
	if _, ok := r.start(3); !ok {
		t.Error("a node with a name has no rank")
	}
}

func TestPrimes(t *testing.T) {
	for _, p := range primes {
		if !new(big.Int).SetUint64(p).ProbablyPrime(20) {
			t.Errorf("%d is no prime", p)
		}
	}
}
