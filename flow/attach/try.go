package attach

import (
	"errors"
	"fmt"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/host/kernel"
)

// Try returns why an interface of the calling thread's network namespace takes no programs at tcx.
// It attaches a program that does nothing behind all others, for a moment. Where there is no tcx,
// it tries nothing.
func Try() error {
	const tcxNext = -1
	nothing, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "GPL", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, tcxNext), asm.Return()}})
	if err != nil {
		return err
	}
	defer nothing.Close()
	nl, err := kernel.Open(0, syscall.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer nl.Close()
	list, err := kernel.Uninterrupted(nl.LinkList)
	if err != nil {
		return fmt.Errorf("interfaces: %w", err)
	}
	var i Interfaces
	for _, each := range list {
		a := each.Attrs()
		if i.kindOf(a) == unknown {
			continue
		}
		for _, s := range []side{ingressSide, egressSide} {
			l, err := link.AttachTCX(link.TCXOptions{Interface: a.Index, Program: nothing, Attach: s.tcx, Anchor: link.Tail()})
			switch {
			case errors.Is(err, ebpf.ErrNotSupported):
				return nil
			case errors.Is(err, syscall.ENODEV): // gone meanwhile
			case err != nil:
				return fmt.Errorf("attach to %s: %w", a.Name, err)
			default:
				_ = l.Close()
			}
		}
	}
	return nil
}
