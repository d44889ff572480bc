package policy

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

func randomAddr(r *rand.Rand, six bool) netip.Addr {
	if six {
		var b [16]byte
		b[0], b[7], b[8], b[15] = 0xfd, byte(r.IntN(3)), byte(r.IntN(3))<<7, byte(r.IntN(16))
		return netip.AddrFrom16(b)
	}
	return netip.AddrFrom4([4]byte{byte(r.IntN(2)) * 255, 0, byte(r.IntN(2)) * 255, byte(r.IntN(16)) * 17})
}

func randomRanges(r *rand.Rand, six bool) []netip.Prefix {
	var out []netip.Prefix
	for range r.IntN(10) {
		a := randomAddr(r, six)
		out = append(out, netip.PrefixFrom(a, r.IntN(a.BitLen()+1)).Masked())
		if r.IntN(2) == 0 {
			out[len(out)-1] = whole(a)
		}
	}
	return out
}

// TestRanges compares sets with going through their lists.
func TestRanges(t *testing.T) {
	for seed := range uint64(5000) {
		r := rand.New(rand.NewPCG(3, seed))
		six := r.IntN(2) == 0
		a, b := randomRanges(r, six), randomRanges(r, six)
		set, other := newRanges(slices.Clone(a)), newRanges(slices.Clone(b))
		both := intersect(set.list, other.list)
		for _, list := range [][]netip.Prefix{set.list, both} {
			for i := range list {
				if i > 0 && (list[i-1].Compare(list[i]) >= 0 || list[i-1].Overlaps(list[i])) {
					t.Fatalf("seed %d: %v is not sorted and apart", seed, list)
				}
			}
		}
		for range 50 {
			x := randomAddr(r, six)
			must.Equalf(t, set.holds(x), contains(a, x), "seed %d: %v holds %s", seed, a, x)
			if in, ok := set.rangeOf(x); ok != contains(a, x) || ok && (!in.Contains(x) || !slices.Contains(a, in)) {
				t.Fatalf("seed %d: %s is in %s of %v", seed, x, in, a)
			}
			if got := contains(both, x); got != (contains(a, x) && contains(b, x)) {
				t.Fatalf("seed %d: %v and %v have in common %v, which holds %s: %v", seed, a, b, both, x, got)
			}
		}
	}
}

// BenchmarkIsPod: whether a client is a pod, on a node with a route for each.
func BenchmarkIsPod(b *testing.B) {
	for _, n := range []int{1, 16, 256, 4096} {
		var list []netip.Prefix
		var asked []netip.Addr
		for i := range n {
			a := netip.AddrFrom4([4]byte{10, 244, byte(i >> 7), byte(i << 1)})
			list, asked = append(list, whole(a)), append(asked, a, a.Next())
		}
		set := newRanges(list)
		b.Run(fmt.Sprintf("routes=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			i, pods := 0, 0
			for b.Loop() {
				if set.holds(asked[i]) {
					pods++
				}
				if i += 7; i >= len(asked) {
					i %= len(asked)
				}
			}
			if pods == 0 && b.N > 2 {
				b.Error("no client is a pod")
			}
		})
	}
}
