package node

import (
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

func TestSettledGC(t *testing.T) {
	for _, c := range []struct {
		inUse uint64
		want  int
	}{{0, 25}, {10 << 20, 25}, {256 << 20, 25}, {400 << 20, 16}, {640 << 20, 10}, {4 << 30, 10}} {
		check.Equalf(t, settledFor(c.inUse), c.want, "with %d MiB in use", c.inUse>>20)
	}
}
