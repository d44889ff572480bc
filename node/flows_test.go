package node

import "testing"

// The default of --max-flows goes by CPUs, as kube-proxy's rule for connection tracking does, and
// takes no more than 1/16 of the memory.
func TestMostFlows(t *testing.T) {
	for _, c := range []struct {
		wanted int
		memory uint64
		want   int
	}{
		{131072, 0, 131072},
		{131072, 1 << 30, 131072},
		{131072, 512 << 20, 97541},
		{1 << 20, 1 << 30, 195083},
		{1 << 20, 64 << 30, 1<<20 - 1},
		{131072, 1, 1},
	} {
		if got := mostFlows(c.wanted, c.memory); got != c.want {
			t.Errorf("%d flows in %d bytes: %d, want %d", c.wanted, c.memory, got, c.want)
		}
	}
}
