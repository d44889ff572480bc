package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/sluice-proxy/sluice/service"
)

// bigTable makes a cluster of services with ten endpoints each, and gives what
// leads to it by kind: a cluster IP for each service, a load balancer IP with
// source ranges for each other one, and node ports as far as Kubernetes has
// them by default.
func bigTable(b testing.TB, services int, cfg Config) (*service.Store, *Table, map[string][]netip.AddrPort) {
	b.Helper()
	dsts := map[string][]netip.AddrPort{}
	add := func(kind, addr string, port int32) {
		dsts[kind] = append(dsts[kind], netip.AddrPortFrom(netip.MustParseAddr(addr), uint16(port)))
	}
	list := make([]svc, services)
	for i := range list {
		s := svc{name: fmt.Sprintf("s%05d", i), clusterIPs: fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&255, i&255)}
		add("ClusterIP", s.clusterIPs, 80)
		if i%2 == 0 {
			s.balancerIPs = fmt.Sprintf("192.%d.%d.%d", i>>16, i>>8&255, i&255)
			s.ranges = "198.51.100.0/24 203.0.113.0/24 10.0.0.0/8"
			add("LoadBalancer", s.balancerIPs, 80)
		}
		if i < 2768 {
			s.nodePort, s.external = 30000+int32(i), "Local"
			add("NodePort", "172.16.0.1", s.nodePort)
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
	return st, Compile(nil, st.Apply(c), cfg), dsts
}

// reportCPU adds the processor time of an operation, which other work on the
// machine disturbs less than the time on the clock.
func reportCPU(b *testing.B) func() {
	used := func() time.Duration {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return time.Duration(u.Utime.Nano() + u.Stime.Nano())
	}
	before := used()
	return func() { b.ReportMetric(float64(used()-before)/float64(b.N), "cpu-ns/op") }
}

// BenchmarkResolve: the promise is at most 300 ns without allocation, flat
// from 100 to 30,000 services. Each question is about another service.
func BenchmarkResolve(b *testing.B) {
	for _, n := range []int{100, 1000, 10000, 30000} {
		_, table, byKind := bigTable(b, n, Config{ClusterCIDRs: prefixes("10.244.0.0/16"), ServiceCIDRs: prefixes("10.96.0.0/12")})
		clients := addresses("10.244.0.5", "172.16.0.1", "198.51.100.7")
		for _, kind := range []string{"ClusterIP", "LoadBalancer", "NodePort"} {
			dsts := byKind[kind]
			b.Run(fmt.Sprintf("services=%d/endpoints=%d/%s", n, n*10, kind), func(b *testing.B) {
				b.ReportAllocs()
				defer reportCPU(b)()
				i := 0
				for b.Loop() {
					if v := table.Resolve(service.TCP, clients[i%3], dsts[i]); v.Port == nil {
						b.Fatal("not found")
					}
					if i += 7919; i >= len(dsts) { // not in the order of memory
						i %= len(dsts)
					}
				}
			})
		}
	}
}

// BenchmarkCompileOneSlice: the Table after one slice of a loaded cluster
// changed.
func BenchmarkCompileOneSlice(b *testing.B) {
	for _, n := range []int{100, 10000, 30000} {
		b.Run(fmt.Sprintf("services=%d/endpoints=%d", n, n*10), func(b *testing.B) {
			st, table, _ := bigTable(b, n, Config{})
			cfg := Config{NodeName: ownNode}
			one := svc{name: "s00001", clusterIPs: "10.96.0.1", endpoints: []string{"10.128.0.1"}}
			snap := st.Apply(service.Change{EndpointSlices: change(b, one).EndpointSlices})
			b.ReportAllocs()
			for b.Loop() {
				Compile(table, snap, cfg)
			}
		})
	}
}

func TestResolveAllocatesNothing(t *testing.T) {
	_, table, byKind := bigTable(t, 100, Config{ClusterCIDRs: prefixes("10.244.0.0/16"), ServiceCIDRs: prefixes("10.96.0.0/12")})
	dsts := slices.Concat(byKind["ClusterIP"], byKind["LoadBalancer"], byKind["NodePort"])
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
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

// TestCompiledSize keeps the promise of compiled's comment.
func TestCompiledSize(t *testing.T) {
	if got := unsafe.Sizeof(compiled{}); got != 128 {
		t.Errorf("compiled has %d bytes", got)
	}
}
