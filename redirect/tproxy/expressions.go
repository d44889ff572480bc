package tproxy

import (
	"slices"
	"syscall"

	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/host/kernel"
)

const (
	tcpSYN = 0x02
	tcpRST = 0x04
	tcpPSH = 0x08
	tcpACK = 0x10

	// Offsets in the headers of TCP, UDP and SCTP.
	portSource      = 0
	portDestination = 2

	// From linux/netfilter/nf_tables.h.
	dynsetAdd            = 0 // NFT_DYNSET_OP_ADD
	rejectWithReset      = 1 // NFT_REJECT_TCP_RST
	rejectWithICMPX      = 2 // NFT_REJECT_ICMPX_UNREACH
	icmpxPortUnreachable = 1 // NFT_REJECT_ICMPX_PORT_UNREACH
)

var (
	rejectTCP   = &expr.Reject{Type: rejectWithReset}
	rejectOther = &expr.Reject{Type: rejectWithICMPX, Code: icmpxPortUnreachable}
	drop        = &expr.Verdict{Kind: expr.VerdictDrop}
	untracked   = []expr.Any{&expr.Notrack{}, &expr.Verdict{Kind: expr.VerdictAccept}}
)

func goTo(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain}}
}

func jump(chain string) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: chain}}
}

// loadKey puts address, protocol and port into the register where sets are looked
// into.
func loadKey(v version, address, port uint32) []expr.Any {
	f := families[v]
	return []expr.Any{
		&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseNetworkHeader, Offset: address, Len: f.addrLen},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: f.regProtocol},
		&expr.Payload{DestRegister: f.regPort, Base: expr.PayloadBaseTransportHeader, Offset: port, Len: 2},
	}
}

// loadFlowKey puts both addresses and ports there.
func loadFlowKey(v version) []expr.Any {
	f := families[v]
	return []expr.Any{
		&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseNetworkHeader, Offset: f.source, Len: f.addrLen},
		&expr.Payload{DestRegister: f.regFlow[0], Base: expr.PayloadBaseTransportHeader, Offset: portSource, Len: 2},
		&expr.Payload{DestRegister: f.regFlow[1], Base: expr.PayloadBaseNetworkHeader, Offset: f.dest, Len: f.addrLen},
		&expr.Payload{DestRegister: f.regFlow[2], Base: expr.PayloadBaseTransportHeader, Offset: portDestination, Len: 2},
	}
}

// count counts the packet by client and destination. Where the set is full, the rule ends.
func count(v version, set string) []expr.Any {
	f := families[v]
	return slices.Concat(isFamily(v), []expr.Any{
		&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseNetworkHeader, Offset: f.source, Len: f.addrLen},
		&expr.Payload{DestRegister: f.regCounted[0], Base: expr.PayloadBaseNetworkHeader, Offset: f.dest, Len: f.addrLen},
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: f.regCounted[1]},
		&expr.Payload{DestRegister: f.regCounted[2], Base: expr.PayloadBaseTransportHeader, Offset: portDestination, Len: 2},
		&expr.Dynset{SrcRegKey: regKey, SetName: set, Operation: dynsetAdd, Timeout: countedFor, Exprs: []expr.Any{&expr.Counter{}}},
	})
}

func found(set string) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: regKey, SetName: set}}
}

// target finds the port of the listener.
func target(set string) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: regKey, DestRegister: regTarget, IsDestRegSet: true, SetName: set}}
}

// isOwn matches packets of sockets of ours on the node's own addresses: the bit
// of the port first, which costs less than the look-up.
func isOwn(v version, address, port uint32, generation int) []expr.Any {
	return slices.Concat(
		[]expr.Any{
			&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseTransportHeader, Offset: port, Len: 2},
			&expr.Lookup{SourceRegister: regKey, SetName: setName(ownPort, v, generation)},
		},
		isFamily(v), loadKey(v, address, port), found(setName(own, v, generation)),
	)
}

// isTransparent matches packets of sockets that are set to IP_TRANSPARENT.
func isTransparent() []expr.Any { return isSocket(expr.SocketKeyTransparent) }

// isWildcard matches packets of sockets that are bound to no address.
func isWildcard() []expr.Any { return isSocket(expr.SocketKeyWildcard) }

func isSocket(key expr.SocketKey) []expr.Any {
	return []expr.Any{
		&expr.Socket{Key: key, Register: regKey},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: []byte{1}},
	}
}

func isLoopback() []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyOIF, Register: regKey},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: binaryutil.NativeEndian.PutUint32(kernel.Loopback)},
	}
}

// isFrom matches what comes in by an interface.
func isFrom(ifname string) []expr.Any {
	name := make([]byte, syscall.IFNAMSIZ)
	copy(name, ifname)
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: regKey},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: name},
	}
}

// isFamily comes first in each rule that looks at addresses, also where the
// chain has seen to it already: without it, nft shows offsets instead of names.
func isFamily(v version) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: regKey},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: []byte{families[v].nfproto}},
	}
}

func isProtocol(p byte) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: regKey},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: []byte{p}},
	}
}

// isOpeningTCP matches the first packet of a connection.
func isOpeningTCP() []expr.Any { return tcpFlags(tcpSYN|tcpACK, expr.CmpOpEq, tcpSYN) }

// isOtherTCP matches all others.
func isOtherTCP() []expr.Any { return tcpFlags(tcpSYN|tcpACK, expr.CmpOpNeq, tcpSYN) }

// isReset matches what tells that there is no connection.
func isReset() []expr.Any { return tcpFlags(tcpRST, expr.CmpOpEq, tcpRST) }

// isTCPData matches packets that end what an application has sent.
func isTCPData() []expr.Any { return tcpFlags(tcpSYN|tcpPSH, expr.CmpOpEq, tcpPSH) }

// tcpFlags compares those flags that are in the mask.
func tcpFlags(mask byte, op expr.CmpOp, want byte) []expr.Any {
	return slices.Concat(isProtocol(syscall.IPPROTO_TCP), []expr.Any{
		&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseTransportHeader, Offset: 13, Len: 1},
		&expr.Bitwise{SourceRegister: regKey, DestRegister: regKey, Len: 1, Mask: []byte{mask}, Xor: []byte{0}},
		&expr.Cmp{Register: regKey, Op: op, Data: []byte{want}},
	})
}

func isPort(port uint32, first, last uint16) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseTransportHeader, Offset: port, Len: 2},
		&expr.Range{Op: expr.CmpOpEq, Register: regKey,
			FromData: binaryutil.BigEndian.PutUint16(first), ToData: binaryutil.BigEndian.PutUint16(last)},
	}
}

// setMark sets one bit of the packet's mark and leaves the others.
func setMark(bit uint32) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: regKey},
		&expr.Bitwise{SourceRegister: regKey, DestRegister: regKey, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(^bit), Xor: binaryutil.NativeEndian.PutUint32(bit)},
		&expr.Meta{Key: expr.MetaKeyMARK, Register: regKey, SourceRegister: true},
	}
}

// hasMark matches packets that have one bit of the mark.
func hasMark(bit uint32) []expr.Any {
	return testBit(&expr.Meta{Key: expr.MetaKeyMARK, Register: regKey}, bit, bit)
}

// hasNoSocketMark matches packets for a socket without that bit.
func hasNoSocketMark(bit uint32) []expr.Any {
	return testBit(&expr.Socket{Key: expr.SocketKeyMark, Register: regKey}, bit, 0)
}

func testBit(load expr.Any, bit, want uint32) []expr.Any {
	return []expr.Any{
		load,
		&expr.Bitwise{SourceRegister: regKey, DestRegister: regKey, Len: 4,
			Mask: binaryutil.NativeEndian.PutUint32(bit), Xor: binaryutil.NativeEndian.PutUint32(0)},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: binaryutil.NativeEndian.PutUint32(want)},
	}
}

func inSet(offset, length uint32, set string) []expr.Any {
	return []expr.Any{
		&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: length},
		&expr.Lookup{SourceRegister: regKey, SetName: set},
	}
}
