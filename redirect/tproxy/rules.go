package tproxy

import (
	"slices"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/kernel"
	"github.com/sluice-proxy/sluice/service"
)

// numbers are what options can change in the rules.
type numbers struct {
	steerMark, replyMark uint32
	// firstReply and lastReply are the ports that answers to clients' own
	// addresses come to.
	firstReply, lastReply uint16
	// nodePorts, first and last, are those that answers to sockets on the node's
	// addresses come to. These sockets have the socketMark.
	nodePorts  [2]uint16
	socketMark uint32
	// lookup says that somebody else finds the sockets for ranges of ours.
	lookup bool
	// omitted is nothing without lookup.
	omitted omitted
}

// rule is one rule before it is added.
type rule struct {
	chain string
	exprs []expr.Any
}

func newRule(chain string, parts ...[]expr.Any) rule { return rule{chain, slices.Concat(parts...)} }

// makeRules gives the rules that look into the sets of a generation. Their
// number does not depend on the plan's size. Every packet of the node passes them, so
// that what is not for a service meets as little as possible: on its way in the
// comparison of its port with a range, a look for its destination, one into
// the ranges of addresses, one into the non-local addresses, and the bit of its
// port; on its way out the last two. (ip6 as ip.)
//
//	chain prerouting: meta nfproto ipv4 goto to4
//	chain to4:        meta l4proto tcp th dport 10000-29999 jump replies
//	                  tcp th dport 32768-65535 ip daddr @node4 jump node
//	                  tcp flags & (syn | psh) == psh ip daddr @local4 notrack accept
//	                  tproxy ip to 127.83.76.1:ip daddr . meta l4proto . th dport map @steer4 notrack accept
//	                  ip daddr @local4 goto rest4
//	                  ip daddr @foreign4 goto foreign4
//	                  th dport @ownport4 ip daddr . meta l4proto . th dport @own4 notrack accept
//	                  meta l4proto udp th dport 10000-29999 jump replies
//	                  meta l4proto udp th dport 32768-65535 ip daddr @node4 jump node
//	                  meta l4proto icmp jump replies
//	chain rest4:      ip daddr . meta l4proto . th dport @refuse4 goto refuse
//	                  ip daddr . meta l4proto . th dport @silent4 goto silence
//	                  ip daddr @cluster4 goto refuse
//	                  goto silence
//	chain foreign4:   meta l4proto tcp tcp flags & (syn | ack) != syn socket transparent 1 goto keep
//	                  meta l4proto tcp tcp flags & (syn | ack) != syn accept
//	                  ip daddr . meta l4proto . th dport @refuse4 goto refuse
//	                  ip daddr . meta l4proto . th dport @silent4 goto silence
//	                  as the second of to4, with @take4 and meta mark set meta mark | 0x1000
//	chain refuse:     meta l4proto tcp tcp flags & (syn | ack) == syn reject with tcp reset
//	                  meta l4proto udp reject with icmpx port-unreachable
//	                  socket transparent 1 notrack accept
//	                  meta l4proto tcp reject with tcp reset
//	                  meta l4proto sctp reject with icmpx port-unreachable
//	chain silence:    as refuse, with drop
//	chain replies:    meta l4proto tcp tcp flags & (syn | ack) == syn return
//	                  socket transparent 1 goto divert
//	chain divert:     socket wildcard 1 return
//	                  meta mark set meta mark | 0x2000 notrack accept
//	chain node:       meta l4proto tcp tcp flags & (syn | ack) == syn return
//	                  socket transparent 1 goto ours
//	chain ours:       socket mark & 0x100 == 0 return
//	                  notrack accept
//	chain keep:       as divert, with 0x1000
//	chain output:     meta nfproto ipv4 goto from4
//	chain from4:      socket transparent 1 jump proxy4
//	                  meta oif lo jump inside4
//	                  ip daddr @foreign4 goto out4
//	                  th sport @ownport4 ip saddr . meta l4proto . th sport @own4 notrack accept
//	                  tcp flags & rst == rst ip saddr @local4 notrack accept    (@foreign4 too)
//	chain proxy4:     meta mark & 0x100 == 0x100 notrack accept
//	                  th sport 10000-29999 notrack accept
//	                  ip saddr @local4 notrack accept
//	                  ip saddr @foreign4 notrack accept
//	chain inside4:    ip daddr @local4 notrack accept
//	                  th dport @ownport4 ip daddr . meta l4proto . th dport @own4 notrack accept
//	chain out4:       ip daddr . meta l4proto . th dport @refuse4 goto turn
//	                  ip daddr . meta l4proto . th dport map @take4 goto aside
//	                  ip daddr . meta l4proto . th dport @silent4 goto aside
//	                  tcp flags & (syn | ack) != syn ip saddr . th sport . ip daddr . th dport @linger4 goto aside
//	chain aside:      meta mark set meta mark | 0x1000 notrack accept
//	chain turn:       as refuse, with goto aside for TCP that opens nothing
//
// With Options.Lookup, to4 has no tproxy of its own, and rest4 has one that looks
// for the listener of the packet's own destination, where the kernel asks the
// sk_lookup program. Once the program has ended with its process, nobody but a
// server of the host's is found there: such a packet is refused (F4). What
// belongs to a connection needs no listener:
//
//	chain rest4:      tcp flags & (syn | ack) != syn notrack accept
//	                  tproxy ip to ip daddr:th dport goto listener
//	                  goto refuse
//	chain listener:   socket wildcard 1 goto refuse
//	                  notrack accept
//
// And the rules that nothing needs are left out, see omitted. If no rule but those
// of rest4 is needed, TCP packets that open no connection pass with one comparison:
//
//	chain prerouting: tcp flags & (syn | ack) != syn accept
func makeRules(generation int, n numbers) []rule {
	var rules []rule
	if n.omitted.data() {
		rules = append(rules, newRule(chainPrerouting, isOtherTCP(), []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}))
	}
	for v := range versions {
		rules = append(rules, newRule(chainPrerouting, isFamily(v), goTo(chainOf(v, chainTo))))
		if !n.omitted.output() {
			rules = append(rules, newRule(chainOutput, isFamily(v), goTo(chainOf(v, chainFrom))))
		}
		rules = append(rules, rulesIn(v, generation, n)...)
		rules = append(rules, rulesOut(v, generation, n)...)
	}
	rules = append(rules, rulesForRest(chainRefuse, rejectTCP, rejectOther)...)
	rules = append(rules, rulesForRest(chainSilence, drop, drop)...)
	return append(rules,
		newRule(chainListener, isWildcard(), goTo(chainRefuse)),
		newRule(chainListener, untracked),
		newRule(chainReplies, isOpeningTCP(), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}),
		newRule(chainReplies, isTransparent(), goTo(chainDivert)),
		// A wildcard listener of somebody else's is no connection of ours (F7).
		newRule(chainDivert, isWildcard(), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}),
		newRule(chainDivert, setMark(n.replyMark), untracked),
		newRule(chainNode, isOpeningTCP(), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}),
		newRule(chainNode, isTransparent(), goTo(chainOurs)),
		// A socket that waits for its end does not say its mark: this rule passes it by.
		newRule(chainOurs, hasNoSocketMark(n.socketMark), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}),
		newRule(chainOurs, untracked),
		newRule(chainKeep, isWildcard(), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}),
		newRule(chainKeep, setMark(n.steerMark), untracked),
		newRule(chainAside, setMark(n.steerMark), untracked),
		newRule(chainTurn, isOpeningTCP(), []expr.Any{rejectTCP}),
		newRule(chainTurn, isProtocol(syscall.IPPROTO_TCP), goTo(chainAside)),
		newRule(chainTurn, isProtocol(syscall.IPPROTO_UDP), []expr.Any{rejectOther}),
		newRule(chainTurn, isProtocol(redirect.ProtocolNumber(service.SCTP)), []expr.Any{rejectOther}),
	)
}

// rulesIn are those for what comes in, also by lo from this node.
func rulesIn(v version, generation int, n numbers) []rule {
	f := families[v]
	set := func(k kind) string { return setName(k, v, generation) }
	to, rest, others := chainOf(v, chainTo), chainOf(v, chainRest), chainOf(v, chainForeign)
	toDestination := loadKey(v, f.dest, portDestination)
	var rules []rule
	needs := func(omitted bool, parts ...[]expr.Any) {
		if !omitted {
			rules = append(rules, newRule(to, parts...))
		}
	}
	o := n.omitted
	needs(o.replies, isProtocol(syscall.IPPROTO_TCP), isPort(portDestination, n.firstReply, n.lastReply), jump(chainReplies))
	needs(o.tracking, isProtocol(syscall.IPPROTO_TCP), isPort(portDestination, n.nodePorts[0], n.nodePorts[1]), isFamily(v), inSet(f.dest, f.addrLen, set(node)), jump(chainNode))
	if !n.lookup {
		// Data for an established connection: the kernel finds the socket by
		// itself, and its route with it, which tproxy would keep it from. What
		// may open a connection passes on: a SYN, and an ACK alone, which may
		// answer a SYN cookie.
		rules = append(rules, newRule(to, isTCPData(), isFamily(v), inSet(f.dest, f.addrLen, set(local)), untracked))
		// A rule ends where tproxy finds neither an established socket nor a
		// listener: then the address's own rules refuse. This one comes before
		// the look into the ranges: while those change, the kernel can miss one.
		rules = append(rules, newRule(to, isFamily(v), toDestination, target(set(steer)), toListener(v), untracked))
	}
	needs(false, isFamily(v), inSet(f.dest, f.addrLen, set(local)), goTo(rest))
	needs(o.foreign, isFamily(v), inSet(f.dest, f.addrLen, set(foreign)), goTo(others))
	needs(o.tracking, isOwn(v, f.dest, portDestination, generation), untracked)
	// For UDP not before the services' addresses: a socket that answers
	// from one of them is transparent, and would be taken for the receiver.
	needs(o.replies, isProtocol(syscall.IPPROTO_UDP), isPort(portDestination, n.firstReply, n.lastReply), jump(chainReplies))
	needs(o.tracking, isProtocol(syscall.IPPROTO_UDP), isPort(portDestination, n.nodePorts[0], n.nodePorts[1]), isFamily(v), inSet(f.dest, f.addrLen, set(node)), jump(chainNode))
	// Errors about packets that were sent from a client's address.
	needs(o.replies, isProtocol(f.icmp), jump(chainReplies))
	if n.lookup {
		rules = append(rules,
			newRule(rest, isOtherTCP(), untracked),
			newRule(rest, isFamily(v), toOwnListener(v), goTo(chainListener)),
			newRule(rest, goTo(chainRefuse)),
		)
	} else {
		rules = append(rules,
			newRule(rest, isFamily(v), toDestination, found(set(refuse)), goTo(chainRefuse)),
			newRule(rest, isFamily(v), toDestination, found(set(silent)), goTo(chainSilence)),
			newRule(rest, isFamily(v), inSet(f.dest, f.addrLen, set(cluster)), goTo(chainRefuse)),
			newRule(rest, goTo(chainSilence)),
		)
	}
	return append(rules,
		// Connections to somebody else's address go on, ours to us and the
		// others past us. (A SYN cookie's answer has no socket yet, and goes
		// past us too.)
		newRule(others, isOtherTCP(), isTransparent(), goTo(chainKeep)),
		newRule(others, isOtherTCP(), []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}),
		newRule(others, isFamily(v), toDestination, found(set(refuse)), goTo(chainRefuse)),
		newRule(others, isFamily(v), toDestination, found(set(silent)), goTo(chainSilence)),
		newRule(others, isFamily(v), toDestination, target(set(take)), setMark(n.steerMark), toListener(v), untracked),
	)
}

// rulesOut are those for what this node sends. They keep packets from and to
// the services' addresses out of connection tracking: it would otherwise see
// half of each connection. The proxy's own come from transparent sockets, which
// is known without a look-up, and those of this node's clients leave by lo:
// packets to endpoints on other hosts pass with two comparisons. What is for an
// address of somebody else's is turned round: its mark gives it a route by lo.
func rulesOut(v version, generation int, n numbers) []rule {
	f := families[v]
	set := func(k kind) string { return setName(k, v, generation) }
	from, proxy, inside, out := chainOf(v, chainFrom), chainOf(v, chainProxy), chainOf(v, chainInside), chainOf(v, chainOut)
	toDestination := loadKey(v, f.dest, portDestination)
	rules := []rule{
		newRule(out, isFamily(v), toDestination, found(set(refuse)), goTo(chainTurn)),
		newRule(out, isFamily(v), toDestination, target(set(take)), goTo(chainAside)),
		newRule(out, isFamily(v), toDestination, found(set(silent)), goTo(chainAside)),
		newRule(out, isOtherTCP(), isFamily(v), loadFlowKey(v), found(set(linger)), goTo(chainAside)),
	}
	if n.omitted.tracking {
		return append(rules, newRule(from, isFamily(v), inSet(f.dest, f.addrLen, set(foreign)), goTo(out)))
	}
	return append(rules,
		newRule(from, isTransparent(), jump(proxy)),
		newRule(from, isLoopback(), jump(inside)),
		newRule(from, isFamily(v), inSet(f.dest, f.addrLen, set(foreign)), goTo(out)),
		newRule(from, isOwn(v, f.source, portSource, generation), untracked),
		// The kernel's own resets belong to no socket. They must not wait for
		// room in the table of connection tracking either.
		newRule(from, isReset(), isFamily(v), inSet(f.source, f.addrLen, set(local)), untracked),
		newRule(from, isReset(), isFamily(v), inSet(f.source, f.addrLen, set(foreign)), untracked),

		newRule(proxy, hasMark(n.socketMark), untracked),
		newRule(proxy, isPort(portSource, n.firstReply, n.lastReply), untracked),
		newRule(proxy, isFamily(v), inSet(f.source, f.addrLen, set(local)), untracked),
		newRule(proxy, isFamily(v), inSet(f.source, f.addrLen, set(foreign)), untracked),

		newRule(inside, isFamily(v), inSet(f.dest, f.addrLen, set(local)), untracked),
		newRule(inside, isOwn(v, f.dest, portDestination, generation), untracked),
	)
}

// toListener hands a packet to the listener whose port is in a register.
func toListener(v version) []expr.Any {
	f := families[v]
	return []expr.Any{
		&expr.Immediate{Register: regListen, Data: f.listen},
		&expr.TProxy{Family: f.nfproto, TableFamily: byte(nftables.TableFamilyINet), RegAddr: regListen, RegPort: regTarget},
	}
}

// toOwnListener hands a packet to the transparent listener that the kernel finds
// for its destination, sk_lookup programs included. The rule ends where there is
// none. What opens a connection between ports whose last connection waits for its
// end finds the listener, too.
func toOwnListener(v version) []expr.Any {
	f := families[v]
	return []expr.Any{
		&expr.Payload{DestRegister: regTarget, Base: expr.PayloadBaseTransportHeader, Offset: portDestination, Len: 2},
		&expr.Payload{DestRegister: regListen, Base: expr.PayloadBaseNetworkHeader, Offset: f.dest, Len: f.addrLen},
		&expr.TProxy{Family: f.nfproto, TableFamily: byte(nftables.TableFamilyINet), RegAddr: regListen, RegPort: regTarget},
	}
}

// rulesForRest is what happens to packets for addresses of ours that are not
// steered. UDP is turned away: its sessions are known here, and were cut, while
// a socket that answers from the address may still be there. A TCP packet that
// opens a connection is turned away at once, so that
// a transparent wildcard listener of somebody else's cannot have it; what
// belongs to an established transparent socket passes (A8.1, A8.7); the rest is
// turned away. Other protocols, ICMP above all, pass.
func rulesForRest(chain string, turnTCP, turnOther expr.Any) []rule {
	return []rule{
		newRule(chain, isOpeningTCP(), []expr.Any{turnTCP}),
		newRule(chain, isProtocol(syscall.IPPROTO_UDP), []expr.Any{turnOther}),
		newRule(chain, isTransparent(), untracked),
		newRule(chain, isProtocol(syscall.IPPROTO_TCP), []expr.Any{turnTCP}),
		newRule(chain, isProtocol(redirect.ProtocolNumber(service.SCTP)), []expr.Any{turnOther}),
	}
}

const (
	tcpSYN = 0x02
	tcpRST = 0x04
	tcpPSH = 0x08
	tcpACK = 0x10

	// Offsets in the headers of TCP, UDP and SCTP.
	portSource      = 0
	portDestination = 2

	// From linux/netfilter/nf_tables.h.
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
