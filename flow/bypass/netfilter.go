package bypass

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// netfilterPrograms finds BPF programs at netfilter's hooks (Linux 6.4), which are in no chain.
// Each has a BPF link. To open the kernel's links takes CAP_SYS_ADMIN, and what the kernel then
// tells of one lacks its network namespace. So a BPF iterator reads them, all in one system
// call; it needs no more than our other programs do.
type netfilterPrograms struct {
	namespace uint32 // its number
	program   *ebpf.Program
	iterator  *link.Iter
}

// netfilterLink is a link as the iterator writes it.
type netfilterLink struct{ Namespace, Hook, Family, Dead uint32 }

// openNetfilterPrograms returns nil if the kernel has no such programs.
func openNetfilterPrograms(namespace int) (*netfilterPrograms, error) {
	err := features.HaveProgramType(ebpf.Netfilter)
	if errors.Is(err, ebpf.ErrNotSupported) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("BPF programs of netfilter: %w", err)
	}
	number, err := sys.NetNSInode(namespace)
	if err != nil {
		return nil, err
	}
	n := &netfilterPrograms{namespace: uint32(number)}
	if n.program, err = loadLinkReader(); err != nil {
		return nil, fmt.Errorf("BPF programs of netfilter cannot be found: %w", err)
	}
	if n.iterator, err = link.AttachIter(link.IterOptions{Program: n.program}); err != nil {
		_ = n.program.Close()
		return nil, fmt.Errorf("BPF programs of netfilter cannot be found: %w", err)
	}
	return n, nil
}

func (n *netfilterPrograms) close() {
	_ = n.iterator.Close()
	_ = n.program.Close()
}

// inStack names a program that forwarded packets pass.
func (n *netfilterPrograms) inStack() (string, error) {
	links, err := n.links()
	if err != nil {
		return "", fmt.Errorf("BPF programs of netfilter: %w", err)
	}
	for _, l := range links {
		ip := l.Family == syscall.AF_INET || l.Family == syscall.AF_INET6
		if l.Namespace == n.namespace && l.Dead == 0 && ip && isForwarding(l.Hook) {
			return "a BPF program of netfilter", nil
		}
	}
	return "", nil
}

// links returns those of all network namespaces.
func (n *netfilterPrograms) links() ([]netfilterLink, error) {
	r, err := n.iterator.Open()
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		return nil, err
	}
	links := make([]netfilterLink, len(b)/binary.Size(netfilterLink{}))
	_, err = binary.Decode(b, binary.NativeEndian, links)
	return links, err
}

// loadLinkReader loads a program that writes a netfilterLink for each link of that kind. It is
// written here and not in bpf/, whose objects need not know the kernel's own structures.
func loadLinkReader() (*ebpf.Program, error) {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return nil, err
	}
	var missing error
	place := func(structure string, path ...string) int32 {
		offset, err := offsetOf(kernel, structure, path...)
		missing = errors.Join(missing, err)
		return int32(offset)
	}
	const (
		ctx, nf = asm.R6, asm.R7
		// On the stack: the network namespace that a link is of, and a netfilterLink.
		net, record                   = -24, -16
		namespace, hook, family, dead = record, record + 4, record + 8, record + 12
	)
	// read copies n bytes of the kernel's, from R3 on.
	read := func(to, n int32) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Reg(asm.R1, asm.RFP), asm.Add.Imm(asm.R1, to),
			asm.Mov.Imm(asm.R2, n),
			asm.FnProbeReadKernel.Call(),
		}
	}
	field := func(to, n int32, path ...string) asm.Instructions {
		return append(asm.Instructions{asm.Mov.Reg(asm.R3, nf), asm.Add.Imm(asm.R3, place("bpf_nf_link", path...))}, read(to, n)...)
	}
	code := slices.Concat(
		asm.Instructions{
			asm.Mov.Reg(ctx, asm.R1),
			asm.LoadMem(nf, ctx, int16(place("bpf_iter__bpf_link", "link")), asm.DWord),
			asm.JEq.Imm(nf, 0, "end"), // behind the last one
			asm.LoadMem(asm.R1, nf, int16(place("bpf_link", "type")), asm.Word),
			asm.JNE.Imm(asm.R1, int32(link.NetfilterType), "end"),
			asm.Mov.Imm(asm.R1, 0),
			asm.StoreMem(asm.RFP, net, asm.R1, asm.DWord),
			asm.StoreMem(asm.RFP, record, asm.R1, asm.DWord),
			asm.StoreMem(asm.RFP, record+8, asm.R1, asm.DWord),
		},
		field(hook, 4, "hook_ops", "hooknum"),
		field(family, 1, "hook_ops", "pf"),
		field(dead, 4, "dead"),
		field(net, 8, "net"),
		asm.Instructions{asm.LoadMem(asm.R3, asm.RFP, net, asm.DWord), asm.Add.Imm(asm.R3, place("net", "ns", "inum"))},
		read(namespace, 4),
		asm.Instructions{
			asm.LoadMem(asm.R1, ctx, int16(place("bpf_iter__bpf_link", "meta")), asm.DWord),
			asm.LoadMem(asm.R1, asm.R1, int16(place("bpf_iter_meta", "seq")), asm.DWord),
			asm.Mov.Reg(asm.R2, asm.RFP), asm.Add.Imm(asm.R2, record),
			asm.Mov.Imm(asm.R3, -record),
			asm.FnSeqWrite.Call(),
			asm.Mov.Imm(asm.R0, 0).WithSymbol("end"),
			asm.Return(),
		},
	)
	if missing != nil {
		return nil, missing
	}
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "sluice_links", Type: ebpf.Tracing, AttachType: ebpf.AttachTraceIter, AttachTo: "bpf_link", License: "GPL", Instructions: code,
	})
}

// offsetOf gives the place of a structure's field in bytes. A path leads to a field of a field.
func offsetOf(kernel *btf.Spec, structure string, path ...string) (offset uint32, err error) {
	var s *btf.Struct
	if err := kernel.TypeByName(structure, &s); err != nil {
		return 0, err
	}
	var in btf.Type = s
	for _, name := range path {
		m, found := member(in, name)
		if !found {
			return 0, fmt.Errorf("struct %s of this kernel has no %s", structure, name)
		}
		offset += m.Offset.Bytes()
		in = btf.UnderlyingType(m.Type)
	}
	return offset, nil
}

// member finds a field of a structure, also in what has no name in it.
func member(in btf.Type, name string) (btf.Member, bool) {
	var members []btf.Member
	switch t := in.(type) {
	case *btf.Struct:
		members = t.Members
	case *btf.Union:
		members = t.Members
	}
	for _, m := range members {
		if m.Name == name {
			return m, true
		}
		if m.Name == "" {
			if inner, found := member(btf.UnderlyingType(m.Type), name); found {
				inner.Offset += m.Offset
				return inner, true
			}
		}
	}
	return btf.Member{}, false
}
