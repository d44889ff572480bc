package netns

import (
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/test/must"
)

// Lose drops one of oneOf packets that an interface sends and that are longer than longer bytes,
// until stop. The sender takes them for sent. oneOf is a power of 2.
func (h *Host) Lose(t testing.TB, ifname string, longer, oneOf int32) (stop func()) {
	t.Helper()
	const loopback, ingress = 1, 1 // whoever takes a packet back has not lost it: lo drops it, as it is for others
	program, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{
		asm.LoadMem(asm.R6, asm.R1, 0, asm.Word), // the length
		asm.FnGetPrandomU32.Call(),
		asm.And.Imm(asm.R0, oneOf-1),
		asm.JNE.Imm(asm.R0, 0, "next"),
		asm.JLE.Imm(asm.R6, longer, "next"),
		asm.Mov.Imm(asm.R1, loopback),
		asm.Mov.Imm(asm.R2, ingress),
		asm.FnRedirect.Call(),
		asm.Return(),
		asm.Mov.Imm(asm.R0, -1).WithSymbol("next"), // TCX_NEXT
		asm.Return(),
	}})
	must.OK(t, err)
	var attached link.Link
	device := h.Link(t, ifname).Attrs().Index
	must.OK(t, h.Do(func() (err error) {
		attached, err = link.AttachTCX(link.TCXOptions{Interface: device, Program: program, Attach: ebpf.AttachTCXEgress, Anchor: link.Head()})
		return err
	}))
	stop = func() {
		_ = attached.Close()
		_ = program.Close()
	}
	t.Cleanup(stop)
	return stop
}
