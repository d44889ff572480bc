package redirect

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
)

// TestMapAgainstModel: a Map and its Builder behave as Go's map does, maps that
// were given out stay as they are, and what changed is found.
func TestMapAgainstModel(t *testing.T) {
	rnd := rand.New(rand.NewPCG(5, 6))
	key := func() service.Destination {
		return service.Destination{Addr: netip.AddrFrom4([4]byte{10, 96, 0, byte(rnd.IntN(250))}), Port: uint16(1 + rnd.IntN(2)), Protocol: service.TCP}
	}
	type version struct {
		m    Map[service.Destination, int]
		want map[service.Destination]int
	}
	var b Builder[service.Destination, int]
	want := map[service.Destination]int{}
	var given []version
	for range 3000 {
		k := key()
		if rnd.IntN(3) == 0 {
			b.Remove(k)
			delete(want, k)
		} else {
			v := rnd.IntN(3)
			b.Set(k, v)
			want[k] = v
		}
		must.Equalf(t, b.Len(), len(want), "keys")
		if v, is := b.made.Get(k); is != b.Has(k) || v != want[k] {
			t.Fatalf("%v: %v, %v", k, v, is)
		}
		if rnd.IntN(20) == 0 {
			given = append(given, version{b.Map(), maps.Clone(want)})
		}
	}
	for i, v := range given {
		if got := maps.Collect(v.m.All()); !maps.Equal(got, v.want) || v.m.Len() != len(v.want) {
			t.Fatalf("version %d changed after it was given out", i)
		}
		other := given[rnd.IntN(len(given))]
		for _, other := range []version{other, {mapOf(other.want), other.want}} {
			must.Equalf(t, v.m.Equal(other.m), maps.Equal(v.want, other.want), "Equal says")
			got := maps.Clone(v.want)
			for k, ch := range changes(v.m, other.m) {
				old, was := v.want[k]
				now, is := other.want[k]
				if ch != (changed[int]{old, now, was, is}) || was == is && old == now {
					t.Fatalf("%v: %+v, want %v %v, %v %v", k, ch, old, was, now, is)
				}
				if is {
					got[k] = now
				} else {
					delete(got, k)
				}
			}
			if !maps.Equal(got, other.want) {
				t.Fatal("the changes do not lead to the other map")
			}
		}
	}
}

func TestMapOfNothing(t *testing.T) {
	var m Set[netip.Addr]
	a := netip.MustParseAddr("10.96.0.1")
	if m.Has(a) || m.Len() != 0 || !m.Equal(SetOf[netip.Addr]()) || !m.With(a, struct{}{}).Without(a).Equal(m) || m.Has(a) {
		t.Error("the zero Map is not empty")
	}
	for k := range m.Keys() {
		t.Errorf("holds %s", k)
	}
}

// Keys of all kinds spread over the shards, and equal ones fall together.
func TestShards(t *testing.T) {
	seen := map[int]bool{}
	for i := range 4096 {
		a := netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)})
		seen[shardOf(a)] = true
		must.Equalf(t, shardOf(a), shardOf(netip.MustParseAddr(a.String())), "one address, two shards")
	}
	if len(seen) < shardCount*9/10 {
		t.Errorf("4096 addresses fall into %d of %d shards", len(seen), shardCount)
	}
}

// clusterPlan has so many services, each with a port on a cluster IP.
func clusterPlan(services int) Plan {
	var steer Builder[service.Destination, Target]
	var ips Builder[netip.Addr, struct{}]
	a := netip.MustParseAddr("10.96.0.1")
	for i := range services {
		steer.Set(service.Destination{Addr: a, Port: 80, Protocol: service.TCP}, Target{Port: uint16(1024 + i)})
		ips.Set(a, struct{}{})
		a = a.Next()
	}
	return Plan{Steer: steer.Map(), ClusterIPs: ips.Map(), Local: LocalOf(netip.MustParsePrefix("10.96.0.0/12"))}
}

// BenchmarkChange is what it costs to make the next plan, with one service more
// or less, and to find what changed.
func BenchmarkChange(b *testing.B) {
	for _, n := range []int{100, 300, 1000, 3000, 10000, 30000} {
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			from := clusterPlan(n)
			a := netip.MustParseAddr("10.96.0.1")
			for range n {
				a = a.Next()
			}
			d := service.Destination{Addr: a, Port: 80, Protocol: service.TCP}
			for b.Loop() {
				to := from
				to.Steer, to.ClusterIPs = from.Steer.With(d, Target{Port: 1}), from.ClusterIPs.With(a, struct{}{})
				if c := Diff(&from, &to); c.Size() != 2 || c.Validate(&to) != nil {
					b.Fatal(c)
				}
			}
		})
	}
}

// mapOf gives a Map with what is in a map.
func mapOf[K Key, V comparable](m map[K]V) Map[K, V] {
	var b Builder[K, V]
	for k, v := range m {
		b.Set(k, v)
	}
	return b.Map()
}
