package sklookup

import (
	"encoding/binary"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
)

// Where the fields of struct __sk_buff and struct bpf_sock lie (linux/bpf.h).
const (
	skbPacketType = 4
	skbMark       = 8
	skbProtocol   = 16

	sockState = 72
)

// Where the headers' fields lie, and what they hold.
const (
	ipv4Fragment, ipv4Protocol, ipv4Source, ipv4Length = 6, 9, 12, 20
	ipv6Next, ipv6Source, ipv6Length                   = 6, 8, 40

	etherIPv4, etherIPv6 = 0x0800, 0x86dd

	fragmentOffset = 0x1fff // in ipv4Fragment

	stateEstablished, stateListen = 1, 10

	packetHost       = 0  // PACKET_HOST: for this node, not for others on its link
	fromNetwork      = 1  // BPF_HDR_START_NET
	currentNamespace = -1 // BPF_F_CURRENT_NETNS
	next             = -1 // TCX_NEXT: the programs after this one decide
)

// Where on the stack the program keeps what it reads: the header of IP, then both
// ports. From the source address on, that is a struct bpf_sock_tuple.
const (
	stackIPv6 = -44
	stackIPv4 = -24
)

// markInstructions are the program of ingress, assembled here as the other one:
//
//	if the packet is not for this node, of TCP or UDP, unfragmented, to a port of the range: next
//	socket = the one that has exactly its addresses and ports
//	if there is one that is connected: mark |= bit
//	next
//
// TCP's look-up also finds sockets in TIME_WAIT, and listening ones, which do not
// count; UDP's finds unconnected ones, which do not count either.
func markInstructions(mark uint32, ports [2]uint16) asm.Instructions {
	var all asm.Instructions
	all = append(all,
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.LoadMem(asm.R0, asm.R6, skbPacketType, asm.Word),
		asm.JNE.Imm(asm.R0, packetHost, "next"),
		asm.LoadMem(asm.R0, asm.R6, skbProtocol, asm.Word),
		asm.JEq.Imm(asm.R0, networkOrder(etherIPv6), "ipv6"),
		asm.JNE.Imm(asm.R0, networkOrder(etherIPv4), "next"),
	)
	// R7 is the protocol, R8 where the ports are, R9 where the tuple is.
	all = append(all, loadBytes(0, stackIPv4, ipv4Length)...)
	all = append(all,
		asm.LoadMem(asm.R0, asm.RFP, stackIPv4+ipv4Fragment, asm.Half),
		asm.And.Imm(asm.R0, networkOrder(fragmentOffset)),
		asm.JNE.Imm(asm.R0, 0, "next"),
		asm.LoadMem(asm.R7, asm.RFP, stackIPv4+ipv4Protocol, asm.Byte),
		asm.LoadMem(asm.R8, asm.RFP, stackIPv4, asm.Byte),
		asm.And.Imm(asm.R8, 0x0f),
		asm.LSh.Imm(asm.R8, 2), // words to bytes
	)
	all = append(all, find(stackIPv4+ipv4Source, stackIPv4+ipv4Length, 12, ports, "4")...)
	ipv6 := loadBytes(0, stackIPv6, ipv6Length)
	ipv6[0] = ipv6[0].WithSymbol("ipv6")
	all = append(all, ipv6...)
	all = append(all,
		asm.LoadMem(asm.R7, asm.RFP, stackIPv6+ipv6Next, asm.Byte),
		asm.Mov.Imm(asm.R8, ipv6Length),
	)
	all = append(all, find(stackIPv6+ipv6Source, stackIPv6+ipv6Length, 36, ports, "6")...)
	return append(all,
		// R1 is a socket that has to be given back, R7 its state.
		asm.FnSkRelease.Call().WithSymbol("tcp"),
		asm.JEq.Imm(asm.R7, stateListen, "next"),
		asm.Ja.Label("mark"),
		asm.FnSkRelease.Call().WithSymbol("udp"),
		asm.JNE.Imm(asm.R7, stateEstablished, "next"),
		asm.LoadMem(asm.R0, asm.R6, skbMark, asm.Word).WithSymbol("mark"),
		asm.Or.Imm32(asm.R0, int32(mark)),
		asm.StoreMem(asm.R6, skbMark, asm.R0, asm.Word),
		asm.Mov.Imm(asm.R0, next).WithSymbol("next"),
		asm.Return(),
	)
}

// find reads the ports and looks for the socket of a tuple on the stack.
func find(tuple, at int16, size int32, ports [2]uint16, label string) asm.Instructions {
	lookUp := func(helper asm.BuiltinFunc, then string) asm.Instructions {
		return asm.Instructions{
			asm.Mov.Reg(asm.R1, asm.R6),
			asm.Mov.Reg(asm.R2, asm.RFP),
			asm.Add.Imm(asm.R2, int32(tuple)),
			asm.Mov.Imm(asm.R3, size),
			asm.Mov.Imm(asm.R4, currentNamespace),
			asm.Mov.Imm(asm.R5, 0),
			helper.Call(),
			asm.JEq.Imm(asm.R0, 0, "next"),
			asm.Mov.Reg(asm.R1, asm.R0),
			asm.LoadMem(asm.R7, asm.R0, sockState, asm.Word),
			asm.Ja.Label(then),
		}
	}
	all := asm.Instructions{
		asm.JEq.Imm(asm.R7, syscall.IPPROTO_TCP, "ports"+label),
		asm.JNE.Imm(asm.R7, syscall.IPPROTO_UDP, "next"),
		asm.Mov.Reg(asm.R1, asm.R6).WithSymbol("ports" + label),
		asm.Mov.Reg(asm.R2, asm.R8),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, int32(at)),
		asm.Mov.Imm(asm.R4, 4),
		asm.Mov.Imm(asm.R5, fromNetwork),
		asm.FnSkbLoadBytesRelative.Call(),
		asm.JNE.Imm(asm.R0, 0, "next"),
		asm.LoadMem(asm.R0, asm.RFP, at+2, asm.Half),
		asm.HostTo(asm.BE, asm.R0, asm.Half),
		asm.JLT.Imm(asm.R0, int32(ports[0]), "next"),
		asm.JGT.Imm(asm.R0, int32(ports[1]), "next"),
		asm.JEq.Imm(asm.R7, syscall.IPPROTO_UDP, "udp"+label),
	}
	all = append(all, lookUp(asm.FnSkcLookupTcp, "tcp")...)
	udp := lookUp(asm.FnSkLookupUdp, "udp")
	udp[0] = udp[0].WithSymbol("udp" + label)
	return append(all, udp...)
}

// loadBytes reads from the packet, counted from the header of IP, to the stack.
func loadBytes(from int32, to int16, size int32) asm.Instructions {
	return asm.Instructions{
		asm.Mov.Reg(asm.R1, asm.R6),
		asm.Mov.Imm(asm.R2, from),
		asm.Mov.Reg(asm.R3, asm.RFP),
		asm.Add.Imm(asm.R3, int32(to)),
		asm.Mov.Imm(asm.R4, size),
		asm.Mov.Imm(asm.R5, fromNetwork),
		asm.FnSkbLoadBytesRelative.Call(),
		asm.JNE.Imm(asm.R0, 0, "next"),
	}
}

// networkOrder gives a number of two bytes as the kernel holds it, which is in
// network byte order.
func networkOrder(n uint16) int32 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], n)
	return int32(binary.NativeEndian.Uint16(b[:]))
}

// loadIngress hands the program to the kernel.
func loadIngress(mark uint32, ports [2]uint16) (*ebpf.Program, error) {
	return ebpf.NewProgram(&ebpf.ProgramSpec{
		Name:         "sluice_ingress",
		Type:         ebpf.SchedCLS,
		AttachType:   ebpf.AttachTCXIngress,
		Instructions: markInstructions(mark, ports),
		License:      "Apache-2.0",
	})
}
