package node

import "testing"

func TestSettledGC(t *testing.T) {
	for _, c := range []struct {
		inUse uint64
		want  int
	}{{0, 25}, {10 << 20, 25}, {256 << 20, 25}, {400 << 20, 16}, {640 << 20, 10}, {4 << 30, 10}} {
		if got := settledFor(c.inUse); got != c.want {
			t.Errorf("with %d MiB in use: %d, want %d", c.inUse>>20, got, c.want)
		}
	}
}
