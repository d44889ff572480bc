package policy

import (
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// nodePorts is the size of Kubernetes' default node port range.
const nodePorts = 2768

// bigTable builds a cluster of services with ten endpoints each. Each has a cluster
// IP, every second one a load balancer IP with source ranges, and the first ones
// have node ports with policy Local.
func bigTable(b testing.TB, services int, cfg Config) (*service.Store, *Table) {
	b.Helper()
	list := make([]svc, services)
	for i := range list {
		s := svc{name: fmt.Sprintf("s%05d", i), clusterIPs: destinations["ClusterIP"].of(i).Addr().String()}
		if i%2 == 0 {
			s.balancerIPs = destinations["LoadBalancer"].of(i / 2).Addr().String()
			s.ranges = "198.51.100.0/24 203.0.113.0/24 10.0.0.0/8"
		}
		if i < nodePorts {
			s.nodePort, s.external = 30000+int32(i), "Local"
		}
		for j := range 10 {
			k := i*10 + j
			s.endpoints = append(s.endpoints, fmt.Sprintf("10.%d.%d.%d node=n%d", 128+k>>16, k>>8&255, k&255, k%100))
		}
		list[i] = s
	}
	c := change(b, list...)
	c.Nodes = append(c.Nodes, nodeObject(ownNode, nil, "172.16.0.1"))
	cfg.NodeName = ownNode
	st := newStore()
	return st, Compile(nil, st.Apply(c), cfg)
}

// destinations returns, by kind, the number of bigTable's destinations and each of
// them. They are computed, because reading a list would cost cache misses that a
// connection does not have.
var destinations = map[string]struct {
	count func(services int) int
	of    func(i int) netip.AddrPort
}{
	"ClusterIP": {func(n int) int { return n }, func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(96 + i>>16), byte(i >> 8), byte(i)}), 80)
	}},
	"LoadBalancer": {func(n int) int { return (n + 1) / 2 }, func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{192, byte(i >> 16), byte(i >> 8), byte(i)}), 80)
	}},
	"NodePort": {func(n int) int { return min(n, nodePorts) }, func(i int) netip.AddrPort {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{172, 16, 0, 1}), uint16(30000+i))
	}},
}

// reportCPU reports the CPU time of an operation. Other work on the machine affects
// it less than elapsed time.
func reportCPU(b *testing.B) func() {
	used := func() time.Duration {
		var u syscall.Rusage
		must.OK(b, syscall.Getrusage(syscall.RUSAGE_SELF, &u))
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := used()
	return func() { b.ReportMetric(float64(used()-before)/float64(b.N), "cpu-ns/op") }
}

// BenchmarkResolve: the target is at most 300 ns without allocation, constant from
// 100 to 30,000 services. Each lookup is for another service, not in the order of
// memory. That is the worst case, because only data that all services share stays
// in a cache.
func BenchmarkResolve(b *testing.B) {
	for _, n := range []int{100, 1000, 10000, 30000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d", n, n*10), func(b *testing.B) {
			_, table := bigTable(b, n, Config{ClusterCIDRs: prefixes("10.244.0.0/16"), ServiceCIDRs: prefixes("10.96.0.0/12")})
			clients := [4]netip.Addr(addresses("10.244.0.5", "172.16.0.1", "198.51.100.7", "203.0.113.9"))
			for _, kind := range []string{"ClusterIP", "LoadBalancer", "NodePort"} {
				count, of := destinations[kind].count(n), destinations[kind].of
				b.Run(kind, func(b *testing.B) {
					b.ReportAllocs()
					defer reportCPU(b)()
					i, k := 0, 0
					for b.Loop() {
						if v := table.Resolve(service.TCP, clients[k%4], of(i)); v.Port == nil {
							b.Fatal("not found")
						}
						k++
						if i += 7919; i >= count { // not in the order of memory
							i %= count
						}
					}
				})
			}
		})
	}
}

// BenchmarkOneSliceChanged measures the Store's Apply and Compile after a change of
// one slice in a large cluster. The target is at most 5 ms.
func BenchmarkOneSliceChanged(b *testing.B) {
	for _, n := range []int{100, 10000, 30000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d", n, n*10), func(b *testing.B) {
			cfg := Config{NodeName: ownNode}
			st, table := bigTable(b, n, cfg)
			var changes [2]service.Change
			for i, endpoints := range [][]string{{"10.128.0.1"}, {"10.128.0.1", "10.128.0.2"}} {
				one := svc{name: "s00001", clusterIPs: "10.96.0.1", endpoints: endpoints}
				changes[i].EndpointSlices = change(b, one).EndpointSlices
			}
			b.ReportAllocs()
			defer reportCPU(b)()
			i := 0
			for b.Loop() {
				before := table.Snapshot()
				table = Compile(table, st.Apply(changes[i%2]), cfg)
				if table.Snapshot() == before {
					b.Fatal("nothing changed")
				}
				i++
			}
		})
	}
}

func TestResolveAllocatesNothing(t *testing.T) {
	const services = 100
	_, table := bigTable(t, services, Config{ClusterCIDRs: prefixes("10.244.0.0/16"), ServiceCIDRs: prefixes("10.96.0.0/12")})
	var dsts []netip.AddrPort
	for _, d := range destinations {
		for i := range d.count(services) {
			dsts = append(dsts, d.of(i))
		}
	}
	dsts = append(dsts, netip.MustParseAddrPort("10.96.0.1:81"), netip.MustParseAddrPort("10.97.0.1:80"), netip.MustParseAddrPort("192.0.2.1:80"))
	clients := addresses("10.244.0.5", "172.16.0.1", "198.51.100.7", "127.0.0.1")
	allocs := testing.AllocsPerRun(10, func() {
		for _, dst := range dsts {
			for _, c := range clients {
				table.Resolve(service.TCP, c, dst)
			}
			table.Steering(service.Destination{Addr: dst.Addr(), Port: dst.Port(), Protocol: service.TCP})
		}
	})
	check.Equalf(t, allocs, 0, "allocations")
}

// TestDecisionFillsALine: with its key, which has 8 bytes.
func TestDecisionFillsALine(t *testing.T) {
	if got := unsafe.Sizeof(decision{}); got != 56 {
		t.Errorf("decision has %d bytes", got)
	}
}
