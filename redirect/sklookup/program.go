package sklookup

import (
	"slices"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"

	"github.com/sluice-proxy/sluice/service"
)

// Where the fields of struct bpf_sk_lookup lie, which is what the program is
// called with (linux/bpf.h). The local side is the destination that the client
// meant. Addresses are in network byte order, the local port is in the host's.
const (
	ctxFamily    = 8
	ctxProtocol  = 12
	ctxLocalIPv4 = 40
	ctxLocalIPv6 = 44
	ctxLocalPort = 60
)

// What the program answers with, and the two families that it knows.
const (
	skDrop = 0 // refuse: a reset, or ICMP port unreachable (F9)
	skPass = 1 // the socket that was assigned, or else go on as without us

	familyIPv4 = 2
	familyIPv6 = 10
)

// Where on the stack the program keeps its keys, which destinationKey and prefixKey
// lay out; those of IPv4 are shorter.
const (
	stackSlot = -4
	stackKey  = -24
	stackTrie = -48
)

// instructions are the program, assembled here so that building needs no
// compiler for BPF:
//
//	value = destinations[address, port, protocol]
//	if there is none: value = ranges[longest prefix of address]
//	if there is none: pass
//	if value is 0 (refused): drop
//	assign sockets[value]; pass; drop when there is no such socket
//
// It runs for each SYN and each UDP datagram that is delivered locally and
// belongs to no connected socket; what is for the host itself costs one miss in
// a hash and one in a trie.
func instructions(m *maps) asm.Instructions {
	ipv6 := lookUp(m, service.IPv6, ctxLocalIPv6)
	ipv6[0] = ipv6[0].WithSymbol("ipv6")
	return slices.Concat(asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R8, asm.R6, ctxProtocol, asm.Word),
		asm.LoadMem(asm.R0, asm.R6, ctxFamily, asm.Word),
		asm.JEq.Imm(asm.R0, familyIPv6, "ipv6"),
		asm.JNE.Imm(asm.R0, familyIPv4, "pass"),
	}, lookUp(m, service.IPv4, ctxLocalIPv4), asm.Instructions{asm.Ja.Label("in range")}, ipv6, asm.Instructions{
		// A range that is silent names the slot for TCP; the one for UDP is next.
		asm.LoadMem(asm.R7, asm.R0, 0, asm.Word).WithSymbol("in range"),
		asm.JEq.Imm(asm.R7, int32(refused), "drop"),
		asm.JNE.Imm(asm.R8, syscall.IPPROTO_UDP, "assign"),
		asm.Add.Imm(asm.R7, 1),
		asm.Ja.Label("assign"),

		asm.LoadMem(asm.R7, asm.R0, 0, asm.Word).WithSymbol("found"),
		asm.JEq.Imm(asm.R7, int32(refused), "drop"),

		asm.StoreMem(asm.RFP, stackSlot, asm.R7, asm.Word).WithSymbol("assign"),
		asm.LoadMapPtr(asm.R1, m.sockets.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stackSlot),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "drop"),
		asm.Mov.Reg(asm.R7, asm.R0),
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Reg(asm.R2, asm.R7),
		asm.Mov.Imm(asm.R3, 0),
		asm.FnSkAssign.Call(),
		asm.Mov.Reg(asm.R8, asm.R0),
		asm.Mov.Reg(asm.R1, asm.R7),
		asm.FnSkRelease.Call(),
		// Somebody else's program has chosen a socket already: the kernel keeps
		// to that one whatever we say.
		asm.JNE.Imm(asm.R8, 0, "drop"),

		asm.Mov.Imm(asm.R0, skPass).WithSymbol("pass"),
		asm.Return(),
		asm.Mov.Imm(asm.R0, skDrop).WithSymbol("drop"),
		asm.Return(),
	})
}

// lookUp puts the keys together and looks into the maps of a family. It goes on
// with a range in R0.
func lookUp(m *maps, f service.Family, address int16) asm.Instructions {
	var all asm.Instructions
	rest := int16(keySize[f]) - 4
	for at := int16(0); at < rest; at += 4 {
		all = append(all,
			asm.LoadMem(asm.R1, asm.R6, address+at, asm.Word),
			asm.StoreMem(asm.RFP, stackKey+at, asm.R1, asm.Word),
			asm.StoreMem(asm.RFP, stackTrie+4+at, asm.R1, asm.Word),
		)
	}
	return append(all,
		asm.LoadMem(asm.R1, asm.R6, ctxLocalPort, asm.Word),
		asm.StoreMem(asm.RFP, stackKey+rest, asm.R1, asm.Half),
		asm.StoreMem(asm.RFP, stackKey+rest+2, asm.R8, asm.Half),
		asm.LoadMapPtr(asm.R1, m.destinations[f].FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stackKey),
		asm.FnMapLookupElem.Call(),
		asm.JNE.Imm(asm.R0, 0, "found"),
		asm.StoreImm(asm.RFP, stackTrie, int64(rest)*8, asm.Word),
		asm.LoadMapPtr(asm.R1, m.ranges[f].FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stackTrie),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
	)
}

// load hands the program to the kernel.
func load(m *maps) (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name:         "sluice",
		Type:         ebpf.SkLookup,
		AttachType:   ebpf.AttachSkLookup,
		Instructions: instructions(m),
		License:      "Apache-2.0",
	})
}
