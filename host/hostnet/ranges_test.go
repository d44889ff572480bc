package hostnet

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

// parseRoutes reads routes as "10.244.1.0/24 pods, 10.244.1.7/32 metric=5".
func parseRoutes(t *testing.T, text string) []route {
	t.Helper()
	var out []route
	for _, one := range strings.Split(text, ",") {
		words := strings.Fields(one)
		if len(words) == 0 {
			continue
		}
		r := route{dst: netip.MustParsePrefix(words[0])}
		for _, w := range words[1:] {
			if w == "pods" {
				r.pods = true
			} else if _, err := fmt.Sscanf(w, "metric=%d", &r.metric); err != nil {
				t.Fatalf("%q: %v", w, err)
			}
		}
		out = append(out, r)
	}
	return out
}

func TestPodRanges(t *testing.T) {
	for _, tt := range []struct{ name, routes, want string }{
		{"nothing", "", ""},
		{"no pods", "10.0.0.0/8, fd00::/8", ""},
		{"a bridge", "10.0.0.0/8, 10.244.1.0/24 pods", "10.244.1.0/24"},
		{"a bridge of both families", "10.244.1.0/24 pods, fd44::/64 pods", "10.244.1.0/24 fd44::/64"},
		{"an interface for each pod", "10.244.1.0/26, 10.244.1.5/32 pods, 10.244.1.9/32 pods", "10.244.1.5/32 10.244.1.9/32"},
		{"the node's own address on the bridge", "10.244.1.0/30 pods, 10.244.1.1/32", "10.244.1.0/32 10.244.1.2/31"},
		{"a route within that leads elsewhere", "10.244.0.0/22 pods, 10.244.2.0/24", "10.244.0.0/23 10.244.3.0/24"},
		{"and pods within that again", "10.244.0.0/23 pods, 10.244.1.0/24, 10.244.1.8/32 pods", "10.244.0.0/24 10.244.1.8/32"},
		{"the lower metric counts", "10.244.1.0/24 pods metric=100, 10.244.1.0/24 metric=10, 10.244.2.0/24 pods metric=1, 10.244.2.0/24", ""},
		{"one of several next hops", "fd44::/64 pods metric=1024, fd44::/64 metric=1024", "fd44::/64"},
		{"everything", "0.0.0.0/0 pods", "0.0.0.0/0"},
	} {
		var got []string
		for _, p := range podRanges(parseRoutes(t, tt.routes)) {
			got = append(got, p.String())
		}
		check.Equalf(t, strings.Join(got, " "), tt.want, "%s", tt.name)
	}
}

// slowLookup decides by the longest matching route whether an address is a pod's.
func slowLookup(routes []route, a netip.Addr) bool {
	var matching []route
	for _, r := range routes {
		if r.dst.Contains(a) {
			matching = append(matching, r)
		}
	}
	if len(matching) == 0 {
		return false
	}
	best := slices.MaxFunc(matching, func(x, y route) int {
		return cmp.Or(cmp.Compare(x.dst.Bits(), y.dst.Bits()), cmp.Compare(y.metric, x.metric), boolCompare(x.pods, y.pods))
	})
	return best.pods
}

func TestPodRangesAgainstLookup(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(1, seed))
		var routes []route
		random := func() netip.Addr {
			b := [4]byte{10, 244, byte(r.IntN(2)), byte(r.IntN(32))}
			if r.IntN(2) == 0 {
				return netip.AddrFrom16([16]byte{0: 0xfd, 14: b[2], 15: b[3]})
			}
			return netip.AddrFrom4(b)
		}
		for range r.IntN(12) {
			a := random()
			p := netip.PrefixFrom(a, a.BitLen()-r.IntN(12)).Masked()
			routes = append(routes, route{dst: p, metric: r.IntN(3), pods: r.IntN(2) == 0})
		}
		got := podRanges(slices.Clone(routes))
		for i, p := range got {
			if p != p.Masked() || i > 0 && (got[i-1].Compare(p) >= 0 || got[i-1].Overlaps(p)) {
				t.Fatalf("seed %d: %v is not sorted and apart", seed, got)
			}
		}
		for range 100 {
			a := random()
			if in := slices.ContainsFunc(got, func(p netip.Prefix) bool { return p.Contains(a) }); in != slowLookup(routes, a) {
				t.Fatalf("seed %d: %s is in %v: %v, which %v contradict", seed, a, got, in, routes)
			}
		}
	}
}
