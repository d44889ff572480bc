package sklookup

import (
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
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

// Where on the stack the program keeps its keys. They are laid out as the Go
// types of the same names.
const (
	stackSlot  = -4
	stackKey4  = -16 // destination4, 8 bytes
	stackTrie4 = -24 // prefix4, 8 bytes
	stackKey6  = -40 // destination6, 20 bytes
	stackTrie6 = -64 // prefix6, 20 bytes
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
	return asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R8, asm.R6, ctxProtocol, asm.Word),
		asm.LoadMem(asm.R0, asm.R6, ctxFamily, asm.Word),
		asm.JEq.Imm(asm.R0, familyIPv6, "ipv6"),
		asm.JNE.Imm(asm.R0, familyIPv4, "pass"),

		// IPv4
		asm.LoadMem(asm.R1, asm.R6, ctxLocalIPv4, asm.Word),
		asm.StoreMem(asm.RFP, stackKey4, asm.R1, asm.Word),
		asm.StoreMem(asm.RFP, stackTrie4+4, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.R6, ctxLocalPort, asm.Word),
		asm.StoreMem(asm.RFP, stackKey4+4, asm.R1, asm.Half),
		asm.StoreMem(asm.RFP, stackKey4+6, asm.R8, asm.Half),
		asm.LoadMapPtr(asm.R1, m.destinations4.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stackKey4),
		asm.FnMapLookupElem.Call(),
		asm.JNE.Imm(asm.R0, 0, "found"),
		asm.StoreImm(asm.RFP, stackTrie4, 32, asm.Word),
		asm.LoadMapPtr(asm.R1, m.ranges4.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stackTrie4),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),
		asm.Ja.Label("in range"),

		// IPv6
		asm.LoadMem(asm.R1, asm.R6, ctxLocalIPv6, asm.Word).WithSymbol("ipv6"),
		asm.StoreMem(asm.RFP, stackKey6, asm.R1, asm.Word),
		asm.StoreMem(asm.RFP, stackTrie6+4, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.R6, ctxLocalIPv6+4, asm.Word),
		asm.StoreMem(asm.RFP, stackKey6+4, asm.R1, asm.Word),
		asm.StoreMem(asm.RFP, stackTrie6+8, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.R6, ctxLocalIPv6+8, asm.Word),
		asm.StoreMem(asm.RFP, stackKey6+8, asm.R1, asm.Word),
		asm.StoreMem(asm.RFP, stackTrie6+12, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.R6, ctxLocalIPv6+12, asm.Word),
		asm.StoreMem(asm.RFP, stackKey6+12, asm.R1, asm.Word),
		asm.StoreMem(asm.RFP, stackTrie6+16, asm.R1, asm.Word),
		asm.LoadMem(asm.R1, asm.R6, ctxLocalPort, asm.Word),
		asm.StoreMem(asm.RFP, stackKey6+16, asm.R1, asm.Half),
		asm.StoreMem(asm.RFP, stackKey6+18, asm.R8, asm.Half),
		asm.LoadMapPtr(asm.R1, m.destinations6.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stackKey6),
		asm.FnMapLookupElem.Call(),
		asm.JNE.Imm(asm.R0, 0, "found"),
		asm.StoreImm(asm.RFP, stackTrie6, 128, asm.Word),
		asm.LoadMapPtr(asm.R1, m.ranges6.FD()),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, stackTrie6),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "pass"),

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
	}
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
