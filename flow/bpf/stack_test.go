package bpf

import (
	"testing"

	"github.com/cilium/ebpf/asm"

	"github.com/sluice-proxy/sluice/test/must"
)

// Kernels before 6.8 round the stack of each function up to 32 bytes, and refuse programs that call each
// other with more than 512 bytes together. Those of the tests may be newer.
func TestStackFitsOlderKernels(t *testing.T) {
	const most, unit = 512, 32
	spec := must.Get(LoadKernel())(t)
	for name, p := range spec.Programs {
		own, calls := make(map[string]int), make(map[string][]string)
		function, moved := "", map[asm.Register]bool{} // registers that have R10
		for i := range p.Instructions {
			ins := &p.Instructions[i]
			if s := ins.Symbol(); s != "" && (i == 0 || isCalled(p.Instructions, s)) {
				function, moved = s, map[asm.Register]bool{}
			}
			depth := 0
			switch op := ins.OpCode; {
			case ins.IsFunctionCall():
				calls[function] = append(calls[function], ins.Reference())
			case op.Class().IsLoad() && ins.Src == asm.R10, op.Class().IsStore() && ins.Dst == asm.R10:
				depth = -int(ins.Offset)
			case op.Class().IsALU() && op.ALUOp() == asm.Mov:
				moved[ins.Dst] = op.Source() == asm.RegSource && ins.Src == asm.R10
			case op.Class().IsALU() && op.ALUOp() == asm.Add && op.Source() == asm.ImmSource && moved[ins.Dst]:
				depth = -int(ins.Constant)
			}
			own[function] = max(own[function], depth)
		}
		var deepest func(function string) int
		deepest = func(function string) (below int) {
			for _, called := range calls[function] {
				below = max(below, deepest(called))
			}
			return below + (max(own[function], 1)+unit-1)/unit*unit
		}
		n := deepest(p.Instructions[0].Symbol())
		t.Logf("%s takes %d bytes", name, n)
		if n > most || n < most/4 {
			t.Errorf("%s takes %d bytes of stack, of which there are %d", name, n, most)
		}
	}
}

func isCalled(list asm.Instructions, function string) bool {
	for i := range list {
		if list[i].IsFunctionCall() && list[i].Reference() == function {
			return true
		}
	}
	return false
}
