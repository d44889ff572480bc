package tproxy

import (
	"slices"
	"syscall"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"

	"github.com/sluice-proxy/sluice/redirect"
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
	// device is the interface by which kernel flows answer clients on the node.
	device string
	// lookup says that somebody else finds the sockets for ranges of ours.
	lookup bool
	// omitted is nothing without lookup.
	omitted omitted
	// kept says that connections to endpoints are kept in connection tracking.
	kept bool
}

// answers reports whether answers to clients' own addresses are looked for after
// translation.
func (n *numbers) answers() bool { return n.kept && !n.omitted.replies }

// ours returns the verdict for packets between our sockets and endpoints, both ways.
func (n *numbers) ours() []expr.Any {
	if n.kept {
		return []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}
	}
	return untracked
}

// rule is one rule before it is added.
type rule struct {
	chain string
	exprs []expr.Any
}

func newRule(chain string, parts ...[]expr.Any) rule { return rule{chain, slices.Concat(parts...)} }

// makeRules returns the rules that look into the sets of a generation. Their
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
//	                  iifname sluice notrack accept
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
//	                  as the fourth of to4, with @take4 and meta mark set meta mark | 0x1000
//	                  ip daddr . meta l4proto . th dport map @take4 goto refuse
//	chain refuse:     tcp flags & (syn | ack) == syn add @counted4 { ip saddr . ip daddr . meta l4proto . th dport timeout 1m counter }
//	                  meta l4proto udp likewise
//	                  meta l4proto tcp tcp flags & (syn | ack) == syn reject with tcp reset
//	                  meta l4proto udp reject with icmpx port-unreachable
//	                  socket transparent 1 notrack accept
//	                  meta l4proto tcp reject with tcp reset
//	                  meta l4proto sctp notrack accept
//	chain silence:    as refuse, with drop, and first
//	                  meta l4proto sctp @th,96,8 == 1 drop    (INIT)
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
//	                  meta l4proto sctp ip saddr @local4 notrack accept
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
// sk_lookup program. If the program ends with its process, nobody but a
// server of the host's is found there: such a packet is refused (F4). What
// belongs to a connection needs no listener:
//
//	chain rest4:      tcp flags & (syn | ack) != syn notrack accept
//	                  tproxy ip to ip daddr:th dport goto listener
//	                  goto refuse
//	chain listener:   socket wildcard 1 goto refuse
//	                  notrack accept
//
// Where the program outlives the process, it refuses by itself, and these rules,
// which look each datagram up twice, are only
//
//	chain rest4:      notrack accept
//
// Where connections to endpoints are kept in connection tracking, the rules with socket
// marks and for source ports 10000-29999 say accept without notrack, and come after those
// for services' addresses. Another program may translate these connections, so that
// replies are looked for afterwards, not in to4 (priority -90):
//
//	chain answers:    meta nfproto ipv4 goto back4
//	chain back4:      tcp th dport 10000-29999 jump replies
//	                  ip daddr @local4 accept
//	                  ip daddr @foreign4 accept
//	                  as in to4 for own addresses, UDP and ICMP
//
// And the rules that nothing needs are left out, see omitted. If no rule but those
// of rest4 is needed, TCP packets that open no connection pass with one comparison:
//
//	chain prerouting: tcp flags & (syn | ack) != syn accept
//
// And if not even those are needed, there is no chain prerouting.
func makeRules(generation int, n numbers) []rule {
	var rules []rule
	if n.omitted.data() && !n.omitted.input() {
		rules = append(rules, newRule(chainPrerouting, isOtherTCP(), []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}))
	}
	for v := range versions {
		if !n.omitted.input() {
			rules = append(rules, newRule(chainPrerouting, isFamily(v), goTo(chainOf(v, chainTo))))
		}
		if !n.omitted.output() {
			rules = append(rules, newRule(chainOutput, isFamily(v), goTo(chainOf(v, chainFrom))))
		}
		if n.answers() {
			rules = append(rules, newRule(chainAnswers, isFamily(v), goTo(chainOf(v, chainBack))))
			rules = append(rules, rulesBack(v, generation, n)...)
		}
		rules = append(rules, rulesIn(v, generation, n)...)
		rules = append(rules, rulesOut(v, generation, n)...)
	}
	for _, chain := range []string{chainRefuse, chainSilence, chainTurn} {
		for v := range versions {
			for _, opening := range [][]expr.Any{isOpeningTCP(), isProtocol(syscall.IPPROTO_UDP)} {
				rules = append(rules, newRule(chain, opening, count(v, setName(counted, v, generation))))
			}
		}
	}
	rules = append(rules, rulesForRest(chainRefuse, rejectTCP, rejectOther)...)
	rules = append(rules, newRule(chainSilence, isINIT(), []expr.Any{drop}))
	rules = append(rules, rulesForRest(chainSilence, drop, drop)...)
	return append(rules,
		newRule(chainListener, isWildcard(), goTo(chainRefuse)),
		newRule(chainListener, untracked),
		newRule(chainReplies, isOpeningTCP(), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}),
		newRule(chainReplies, isTransparent(), goTo(chainDivert)),
		// A wildcard listener of somebody else's is no connection of ours (F7).
		newRule(chainDivert, isWildcard(), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}),
		newRule(chainDivert, setMark(n.replyMark), n.ours()),
		newRule(chainNode, isOpeningTCP(), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}),
		newRule(chainNode, isTransparent(), goTo(chainOurs)),
		// A socket that waits for its end does not say its mark: this rule passes it by.
		newRule(chainOurs, hasNoSocketMark(n.socketMark), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}),
		newRule(chainOurs, n.ours()),
		newRule(chainKeep, isWildcard(), []expr.Any{&expr.Verdict{Kind: expr.VerdictReturn}}),
		newRule(chainKeep, setMark(n.steerMark), untracked),
		newRule(chainAside, setMark(n.steerMark), untracked),
		newRule(chainTurn, isOpeningTCP(), []expr.Any{rejectTCP}),
		newRule(chainTurn, isProtocol(syscall.IPPROTO_TCP), goTo(chainAside)),
		newRule(chainTurn, isProtocol(syscall.IPPROTO_UDP), []expr.Any{rejectOther}),
	)
}

// isSCTP matches SCTP. Nothing steers it: the kernel finds the listener that is bound to
// the packet's destination, answers with an ABORT where there is none, and sends what its
// sockets and it itself say from the services' addresses.
func isSCTP() []expr.Any { return isProtocol(redirect.ProtocolNumber(service.SCTP)) }

// isINIT matches SCTP packets that open an association: an INIT is alone in its packet.
func isINIT() []expr.Any {
	return slices.Concat(isSCTP(), []expr.Any{
		&expr.Payload{DestRegister: regKey, Base: expr.PayloadBaseTransportHeader, Offset: 12, Len: 1},
		&expr.Cmp{Register: regKey, Op: expr.CmpOpEq, Data: []byte{1}},
	})
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
	o.replies = o.replies || n.kept // see rulesBack
	needs(o.replies, isProtocol(syscall.IPPROTO_TCP), isPort(portDestination, n.firstReply, n.lastReply), jump(chainReplies))
	needs(o.tracking || n.kept, isProtocol(syscall.IPPROTO_TCP), isPort(portDestination, n.nodePorts[0], n.nodePorts[1]),
		isFamily(v), inSet(f.dest, f.addrLen, set(node)), jump(chainNode))
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
	// Answers to clients on the node, whose own packets rulesOut leaves untracked.
	needs(o.tracking, isFrom(n.device), untracked)
	// For UDP not before the services' addresses: a socket that answers
	// from one of them is transparent, and would be taken for the receiver.
	needs(o.replies, isProtocol(syscall.IPPROTO_UDP), isPort(portDestination, n.firstReply, n.lastReply), jump(chainReplies))
	needs(o.tracking || n.kept, isProtocol(syscall.IPPROTO_UDP), isPort(portDestination, n.nodePorts[0], n.nodePorts[1]),
		isFamily(v), inSet(f.dest, f.addrLen, set(node)), jump(chainNode))
	// Errors about packets that were sent from a client's address.
	needs(o.replies, isProtocol(f.icmp), jump(chainReplies))
	switch {
	case o.shield:
		rules = append(rules, newRule(rest, untracked))
	case n.lookup:
		rules = append(rules,
			newRule(rest, isOtherTCP(), untracked),
			newRule(rest, isFamily(v), toOwnListener(v), goTo(chainListener)),
			newRule(rest, goTo(chainRefuse)),
		)
	default:
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
		// The listener has ended with its process: a server of the host's may be found (F4).
		newRule(others, isFamily(v), toDestination, target(set(take)), goTo(chainRefuse)),
	)
}

// rulesBack find the answers to clients' own addresses where another program may have
// translated the connection: by now, that is undone. The order is that of rulesIn.
func rulesBack(v version, generation int, n numbers) []rule {
	f, back := families[v], chainOf(v, chainBack)
	set := func(k kind) string { return setName(k, v, generation) }
	pass := []expr.Any{&expr.Verdict{Kind: expr.VerdictAccept}}
	return []rule{
		newRule(back, isProtocol(syscall.IPPROTO_TCP), isPort(portDestination, n.firstReply, n.lastReply), jump(chainReplies)),
		newRule(back, isFamily(v), inSet(f.dest, f.addrLen, set(local)), pass),
		newRule(back, isFamily(v), inSet(f.dest, f.addrLen, set(foreign)), pass),
		newRule(back, isOwn(v, f.dest, portDestination, generation), pass),
		newRule(back, isProtocol(syscall.IPPROTO_UDP), isPort(portDestination, n.firstReply, n.lastReply), jump(chainReplies)),
		newRule(back, isProtocol(f.icmp), jump(chainReplies)),
	}
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
	services := []rule{
		newRule(proxy, isFamily(v), inSet(f.source, f.addrLen, set(local)), untracked),
		newRule(proxy, isFamily(v), inSet(f.source, f.addrLen, set(foreign)), untracked),
	}
	endpoints := []rule{
		newRule(proxy, hasMark(n.socketMark), n.ours()),
		newRule(proxy, isPort(portSource, n.firstReply, n.lastReply), n.ours()),
	}
	if n.kept {
		// A service's port may be one of those for clients' addresses.
		own := newRule(proxy, isOwn(v, f.source, portSource, generation), untracked)
		rules = slices.Concat(rules, services, []rule{own}, endpoints)
	} else {
		rules = slices.Concat(rules, endpoints, services)
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
		newRule(from, isSCTP(), isFamily(v), inSet(f.source, f.addrLen, set(local)), untracked),

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
// turned away. SCTP passes (see isSCTP), as do other protocols, ICMP above all.
func rulesForRest(chain string, turnTCP, turnOther expr.Any) []rule {
	return []rule{
		newRule(chain, isOpeningTCP(), []expr.Any{turnTCP}),
		newRule(chain, isProtocol(syscall.IPPROTO_UDP), []expr.Any{turnOther}),
		newRule(chain, isTransparent(), untracked),
		newRule(chain, isProtocol(syscall.IPPROTO_TCP), []expr.Any{turnTCP}),
		newRule(chain, isSCTP(), untracked),
	}
}
