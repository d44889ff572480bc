package main

// flows are mistakes in the BPF programs of kernel flows.
var flows = []mutation{
	{
		name: "flow-earlier-lists-left", what: "lists of endpoints of an earlier process stay in the table",
		file: "flow/server.go", old: "c.Magic != 0, c.LastList", new: "c.Magic != 0, 0",
		pkg: "flow", test: "TestTableOfAnEarlierProcess",
	},
	{
		name: "flow-affinity-never-moves", what: "a client gets the same endpoint each time that it was forgotten",
		file: "flow/bpf/table.h", old: "t.dst.word[2] = pin->used;", new: "t.dst.word[2] = 0;",
		pkg: "flow", test: "TestAffinityEnds",
	},
	{
		name: "flow-early-lost", what: "connections that begin while a process adopts flows go to no other endpoint",
		file: "flow/adopt.go", old: "w.handle(&events[i].event, events[i].data)", new: "_ = events[i]",
		pkg: "flow", test: "TestConnectionsBeforeAdoptionAreRetried",
	},
	{
		name: "flow-adopts-its-own", what: "a process takes connections of its own for those of the one before, and two connections get one index",
		file: "flow/path.go", old: "			p.state.Store(next)\n			p.server.worker.adopt(p, next)\n		})\n	}\n", new: "			p.state.Store(next)\n		})\n		defer p.onLoop(func() { p.server.worker.adopt(p, next) })\n	}\n",
		pkg: "flow", test: "TestFirstPolicyFindsFlowsAdopted",
	},
	{
		name: "flow-shapes-relayed", what: "UDP sessions that begin with GSO or a fragment are relayed",
		file: "flow/bpf/flow.bpf.c", old: "return p->fragment != LATER_FRAGMENT;", new: "return is_single(skb, p);",
		pkg: "flow", test: "TestFirstDatagramsOfEachShape",
	},
	{
		name: "flow-limits-ignored", what: "connections that the kernel forwards know no limits",
		file: "flow/worker.go", old: "end, ok := w.takePlace(s, &v.Port.Limits, now)", new: "end, ok := conntrack.EndNone, true",
		pkg: "test/e2e", test: "TestLimitsAreExactOnBothPaths",
	},
	{
		name: "flow-limits-by-table", what: "the table decides about connections that limits count",
		file: "flow/table.go", old: " && !s.isLimited()", new: "",
		pkg: "test/e2e", test: "TestLimitsAreExactOnBothPaths",
	},
	{
		name: "flow-places-lost", what: "a forwarded connection that ends leaves its place to nobody",
		file: "flow/end.go", old: "f.givePlace()", new: "",
		pkg: "test/e2e", test: "TestLimitsAreExactOnBothPaths",
	},
	{
		name: "flow-sessions-unlimited", what: "the kernel forwards more UDP sessions of a Service than its limit",
		file: "datagram/places.go", old: "addBelow(&p.group.open, o.MaxServiceSessions)", new: "addBelow(&p.group.open, 1<<30)",
		pkg: "test/e2e", test: "TestSessionLimitsAreExactOnBothPaths",
	},
	{
		name: "flow-outside-unhidden", what: "the table shows clients from outside whose address is to be hidden",
		file: "policy/uniform.go", old: "u.HidesPods, u.HidesOthers = true, true", new: "",
		pkg: "policy", test: "TestUniformIsWhatResolveSays",
	},
	{
		name: "flow-pods-as-outside", what: "the table sends a pod to the endpoints of clients from outside",
		file: "flow/bpf/table.h", old: "pod ? s->pods_list : s->list", new: "s->list",
		pkg: "flow", test: "TestPodsPassPolicyLocal",
	},
	{
		name: "flow-pods-list-shared", what: "pods get the list of other clients also where policy Local makes that shorter",
		file: "flow/table.go", old: "!sameSlice(u.Candidates, u.ForPods)", new: "false",
		pkg: "flow", test: "TestPodsPassPolicyLocal",
	},
	{
		name: "flow-hidden-asked", what: "the process is asked about clients that are hidden",
		file: "flow/bpf/table.h", old: "if (!e || ((hidden || own) && !(c->hides & HIDES)))", new: "if (!e || hidden || own)",
		pkg: "flow", test: "TestHiddenClientsAreTheTables",
	},
	{
		name: "flow-hidden-left", what: "a closed connection of a hidden client keeps its port of the node",
		file: "flow/bpf/table.h", old: "	if (f->options & OPTION_MASQUERADE) {\n		set_tuple(&t, f, UNMASQUERADE);", new: "	if (0) {\n		set_tuple(&t, f, UNMASQUERADE);",
		pkg: "flow", test: "TestHiddenClientsAreTheTables",
	},
	{
		name: "flow-ranges-ignored", what: "the table serves clients that source ranges do not admit",
		file: "flow/bpf/flow.bpf.c", old: "first && !own && !is_admitted(p, s)", new: "0",
		pkg: "flow/bpf", test: "TestModelOfPackets",
	},
	{
		name: "flow-ranges-lost", what: "a Service that goes takes the source ranges of another one away",
		file: "flow/ranges.go", old: "s.uses > 0 {", new: "s.uses > 0 {\n\t\tkeys, _ := rangesOf(set, s.list)\n\t\tr.remove(keys)",
		pkg: "flow", test: "TestSourceRangesAreTheTables",
	},
	{
		name: "flow-ranges-full", what: "clients of a Service whose source ranges have no room are all served",
		file: "flow/table.go", old: "admits = false", new: "admits = true",
		pkg: "flow", test: "TestSourceRangesWithoutRoom",
	},
	{
		name: "flow-affinity-unrenewed", what: "connections that the table decides about do not renew session affinity",
		file: "flow/bpf/table.h", old: "pin->used = now;", new: "",
		pkg: "flow", test: "TestAffinityWhileNobodyRuns",
	},
	{
		name: "flow-affinity-forever", what: "the table never forgets a client of session affinity",
		file: "flow/bpf/table.h", old: "if (pin && (__s64)(now - pin->used) < (__s64)s->window)", new: "if (pin)",
		pkg: "flow", test: "TestAffinityEnds",
	},
	{
		name: "flow-affinity-random", what: "a client of session affinity that is not remembered yet gets any endpoint",
		file: "flow/bpf/table.h", old: "(hash_of(&t) >> 32) * count >> 32", new: "bpf_get_prandom_u32() % count",
		pkg: "test/e2e", test: "TestAbsentProcessRefusesNobody",
	},
	{
		name: "flow-affinity-hashed", what: "new clients of session affinity get an endpoint by a hash whatever the algorithm is",
		file: "flow/table.go", old: "return bpf.KernelDecidingASK_NEW, true", new: "return 0, true",
		pkg: "flow", test: "TestAffinityOfOtherAlgorithms",
	},
	{
		name: "flow-affinity-lost", what: "the next process does not know the clients that the table remembers",
		file: "flow/remembered.go", old: "p.balancer.Restore(left, poll.Nanotime())", new: "p.balancer.Restore(left[:0], poll.Nanotime())",
		pkg: "flow", test: "TestClientsOfAnEarlierProcess",
	},
	{
		name: "flow-affinity-failed", what: "a client is remembered by the kernel at an endpoint that has failed",
		file: "balancer/pins.go", old: "s.untellLocked(&s.pins[at])\n\ts.unlinkLocked(at)", new: "s.unlinkLocked(at)",
		pkg: "balancer", test: "TestMirrorHasThePins",
	},
	{
		name: "flow-absent-refuses", what: "without a process, nobody is served from outside",
		file: "policy/uniform.go", old: "d == nil || !d.is(usable)", new: "d == nil || d.kind != service.ClusterIP || !d.is(usable)",
		pkg: "test/e2e", test: "TestAbsentProcessRefusesNobody",
	},
	{
		name: "flow-relayed-translated", what: "packets of a connection that the relay has go to the endpoint of the one before",
		file: "flow/bpf/flow.bpf.c", old: "if (before)\n\t\texchange(", new: "if (0)\n\t\texchange(",
		pkg: "flow/bpf", test: "TestModelOfPackets",
	},
	{
		name: "flow-ports-unsummed", what: "the checksum does not follow translated ports",
		file: "flow/bpf/translate.h", old: "bpf_l4_csum_replace(skb, at, old, new, flags | sizeof(new))", new: "0",
		pkg: "flow/bpf", test: "TestModelOfPackets",
	},
	{
		name: "flow-quote-unsummed", what: "an ICMP error is damaged by its quoted packet's checksum",
		file: "flow/bpf/icmp.h", old: "if (balanced && bpf_l4_csum_replace(skb, check, 0, difference(&is, &i->tuple), 0))", new: "if (0)",
		pkg: "flow/bpf", test: "TestModelOfPackets",
	},
	{
		name: "flow-refusal-unquoted", what: "a forged ICMP error moves a session whose datagram it does not know",
		file: "flow/bpf/icmp.h", old: "if ((sent ^ i->sequence) >> 16)", new: "if (0)",
		pkg: "flow", test: "TestForgedRefusalMovesNoSession",
	},
	{
		name: "flow-refusal-unsummed", what: "the checksum that an ICMP error quotes is not compared",
		file: "flow/bpf/icmp.h", old: "return (__u16)~check % 0xffff == sum % 0xffff;", new: "return 1;",
		pkg: "flow/bpf", test: "TestModelOfPackets",
	},
	{
		name: "flow-refusal-from-anywhere", what: "any host refuses a session by its own address",
		file: "flow/bpf/icmp.h", old: " && fib.ifindex == skb->ingress_ifindex", new: "",
		pkg: "flow", test: "TestForgedRefusalMovesNoSession",
	},
	{
		name: "flow-refusal-from-one-address", what: "an IPv6 endpoint that refuses from another of its addresses keeps its sessions",
		file: "flow/bpf/icmp.h", old: "return (!found || found == NO_NEIGHBOUR)", new: "return 0",
		pkg: "flow", test: "TestRefusalFromAnotherAddressEndsTheSession",
	},
	{
		name: "flow-ports-hogged", what: "one client's UDP sessions keep all ports of the node from others",
		file: "flow/room.go", old: " || f.isCrowdedOut(o.shared().Client)", new: "",
		pkg: "flow", test: "TestNoClientTakesAllPorts",
	},
	{
		name: "flow-room-halved", what: "a Service has half of the table, though others need nothing",
		file: "flow/bpf/table.h", old: " || (__s64)(c->given - c->taken) > c->least_spare", new: "",
		pkg: "flow/bpf", test: "TestModelOfPackets",
	},
	{
		name: "flow-room-of-others", what: "one Service's connections are relayed, and reset, though others need no flows",
		file: "flow/worker.go", old: "serviceShare, spareShare = 2, 8", new: "serviceShare, spareShare = 2, 1",
		pkg: "test/e2e", test: "TestServiceHasWhatOthersDoNotNeed",
	},
	{
		name: "flow-table-for-ever", what: "the table of a process that is gone decides for ever",
		file: "flow/bpf/table.h", old: "now > c->decides_until || ", new: "",
		pkg: "flow/bpf", test: "TestModelOfPackets",
	},
	{
		name: "flow-relayed-taken", what: "kernel flows take the UDP sessions that the relay has when they begin",
		file: "flow/path.go", old: "		p.server.leaveToRelay()\n", new: "",
		pkg: "flow", test: "TestSessionsOfTheRelayStayItsOwn",
	},
	{
		name: "flow-start-fatal", what: "with --datapath auto, an error of the start of kernel flows ends the proxy",
		file: "node/flows.go", old: "if o.DataPath == KernelPath {", new: "if o.DataPath != RelayPath {",
		pkg: "node", test: "TestFlowsThatDoNotStart",
	},
	{
		name: "flow-start-waits", what: "nobody is served while the kernel verifies the programs of kernel flows",
		file: "node/loop.go", old: "		t.group.Go(p.startFlows)\n", new: "		p.startFlows()\n",
		pkg: "node", test: "TestRelayServesWhileFlowsStart",
	},
	{
		name: "flow-forwarding-once", what: "what the node forwards is asked at the start alone",
		file: "flow/forwarding.go", old: "				_, _ = w.check() // it logs\n", new: "",
		pkg: "flow", test: "TestForwardingIsFollowed",
	},
	{
		name: "flow-rules-passed", what: "a client that kernel flows do not serve passes network policies by the relay",
		file: "flow/judged.go", old: "	s.judges.refuse(client, vip, port)\n", new: "	s.judges.refuse(client, vip, port)\n	return false\n",
		pkg: "test/e2e", test: "TestClientsForceNothingPastRules",
	},
	{
		name: "flow-rules-annotated", what: "an annotation has the relay refuse a Service that the kernel could forward",
		file: "flow/service.go", old: "	if judged && !is {", new: "	if !judged && !is {",
		pkg: "flow", test: "TestRulesOverrideAnnotations",
	},
	{
		name: "flow-session-forgotten", what: "a tenant's packets have others' relayed sessions move to the kernel",
		file: "flow/bpf/upcall.h", old: "bpf_map_lookup_elem(&sessions, &t))", new: "0)",
		pkg: "flow", test: "TestSessionsOfTheRelayStayItsOwn",
	},
	{
		name: "flow-dropped-takes", what: "what the node's rules drop takes a session over",
		file: "flow/bpf/track.h", old: "return !(f->seen & PASSED) &&", new: "return 0 &&",
		pkg: "flow", test: "TestAttackersChangeNothing",
	},
	{
		name: "flow-session-until-last", what: "the record of an idle session ends with its last datagram",
		file: "flow/timeouts.go", old: "	f.end(conntrack.Idle, now)\n	f.drop()\n}", new: "	f.end(conntrack.Idle, f.last())\n	f.drop()\n}",
		pkg: "flow", test: "TestRecordOfAShortSession",
	},
	{
		name: "flow-reset-believed", what: "anybody resets a connection by an old sequence number",
		file: "flow/bpf/track.h", old: "p->sequence - f->way[from].end <= 1;", new: "1;",
		pkg: "flow/bpf", test: "TestModelOfConnections",
	},
	{
		name: "flow-data-taken-back", what: "an acknowledgement takes back what another CPU has counted",
		file: "flow/bpf/track.h", old: "if (end - old - 1 >= LARGEST_WINDOW)", new: "if (end - old > LARGEST_WINDOW)",
		pkg: "flow/bpf", test: "TestAcknowledgementsTakeNoDataBack",
	},
	{
		name: "flow-erased-in-part", what: "of flows that end together, some stay in the index",
		file: "flow/bpf/index.go", old: "for i := range all {\n\t\tx.exchange(", new: "for i := range min(len(all), 32) {\n\t\tx.exchange(",
		pkg: "flow/bpf", test: "TestIndexModel",
	},
	{
		name: "flow-node-port-kept", what: "a hidden client gets the answers to a socket of the node",
		file: "flow/bpf/flow.bpf.c", old: "|| !is_taken_here(skb, p))", new: "|| 1)",
		pkg: "flow", test: "TestNodeBeginsAtAHiddenClientsPort",
	},
	{
		name: "flow-any-port-kept", what: "a hidden client gets the answers to a socket of the node at a port that no flow had before",
		file: "flow/bpf/direct.h", old: "return (p->tuple.protocol == IPPROTO_TCP && is_opening(p)) || ", new: "return ",
		pkg: "flow", test: "TestNodeBeginsAtAHiddenClientsPort",
	},
	{
		name: "flow-masqueraded-port-kept", what: "a client on the node gets the answers to a pod that rules masquerade",
		file: "flow/bpf/direct.h", old: "(skb->ingress_ifindex || has_socket(", new: "(has_socket(",
		pkg: "flow", test: "TestOthersMasqueradeAtAFlowsPort",
	},
	{
		name: "flow-hidden-port-changed", what: "endpoints see another port than a hidden client's own",
		file: "flow/bpf/table.h", old: "if (i || port < FIRST_PORT", new: "if (1 || port < FIRST_PORT",
		pkg: "flow", test: "TestHiddenClientsAreTheTables",
	},
	{
		name: "flow-hidden-udp-port", what: "a hidden UDP client has a port that sockets of the node may get",
		file: "flow/bpf/table.h", old: " || f->protocol != IPPROTO_TCP)\n\t\t\tport =", new: ")\n\t\t\tport =",
		pkg: "flow", test: "TestHiddenClientsAreTheTables",
	},
	{
		name: "flow-asked-port-changed", what: "the process gives a client on the node another port than its own",
		file: "flow/ports.go", old: "own < bpf.FirstPort || ", new: "own > 0 || own < bpf.FirstPort || ",
		pkg: "flow", test: "TestNodeClientsAreTheTables",
	},
	{
		name: "flow-dropped-believed", what: "an RST that the node drops ends a connection",
		file: "flow/bpf/flow.bpf.c", old: "if (unlikely(is_ending(&p, f)) && !hop && !(f->options & OPTION_NODE))", new: "if (0)",
		pkg: "flow", test: "TestDroppedPacketsEndNoConnection",
	},
	{
		name: "flow-ending-unfollowed", what: "nobody hears of a connection's end that egress has to follow",
		file: "flow/bpf/flow.bpf.c", old: "note_passed(skb, &p, passage == JUDGED) < 0", new: "note_passed(skb, &p, 0) < 0",
		pkg: "flow", test: "TestDroppedPacketsEndNoConnection",
	},
	{
		name: "flow-client-lost", what: "a client that comes back with its port reaches nobody if its endpoint is gone",
		file: "flow/bpf/track.h", old: "if (p->sequence != f->first_sequence && challenge(skb, f, index))", new: "if (0)",
		pkg: "flow", test: "TestClientComesBackWithItsPort",
	},
	{
		name: "flow-challenge-known", what: "a forged SYN and RST end a connection",
		file: "flow/bpf/track.h", old: "f->challenge && p->sequence == f->challenge", new: "f->challenge",
		pkg: "flow", test: "TestForgedSYNChangesNoConnection",
	},
	{
		name: "flow-ending-new", what: "a connection that begins while shortcuts end takes them, unknown to connection tracking",
		file: "flow/bpf/shortcut.h", old: "(!c->shortcuts_ending || (f->state == OPEN && f->answered < c->shortcuts_ending))", new: "1",
		pkg: "flow", test: "TestConnectionsThatBeginWhileShortcutsEnd",
	},
	{
		name: "flow-ending-untold", what: "BPF does not know that shortcuts are about to end",
		file: "flow/shortcut.go", old: "atomic.StoreUint64(ending, uint64(sys.Monotonic()))", new: "",
		pkg: "flow", test: "TestConnectionsThatBeginWhileShortcutsEnd",
	},
	{
		name: "flow-tracked-half", what: "a connection of which tracking has seen the SYN alone stays so, and its packets are invalid",
		file: "host/tracking/entries.go", old: "syscall.NLM_F_CREATE|syscall.NLM_F_ACK", new: "syscall.NLM_F_CREATE|syscall.NLM_F_EXCL|syscall.NLM_F_ACK",
		pkg: "flow", test: "TestConnectionsThatBeginWhileShortcutsEnd",
	},
	{
		name: "flow-itself", what: "an endpoint that asks itself by the port at which it serves gets no answer",
		file: "flow/bpf/inject.h", old: "if (old == reference(index, TO_CLIENT))", new: "if (0)",
		pkg: "flow", test: "TestEndpointAsksItselfByItsPort",
	},
	{
		name: "flow-hidden-takes-direct", what: "a hidden client's flow takes the tuple of the client's own connection to the endpoint",
		file: "flow/bpf/inject.h", old: "role_in(old) == TO_ENDPOINT || take_over(&t, index, MASQUERADE)", new: "take_over(&t, index, MASQUERADE)",
		pkg: "flow", test: "TestHiddenClientsOwnConnectionGoesOn",
	},
	{
		name: "flow-direct-port-kept", what: "a client that asks an endpoint itself keeps a port that the endpoint knows",
		file: "flow/bpf/flow.bpf.c", old: "if (!is_taken(skb, p))", new: "if (1)",
		pkg: "flow", test: "TestClientsMixServicesAndEndpoints",
	},
	{
		name: "flow-gap-believed", what: "a blind reset ends a connection",
		file: "flow/bpf/track.h", old: "if (is_behind(old, sequence)) {", new: "if (1) {",
		pkg: "flow", test: "TestBlindResetEndsNoConnection",
	},
	{
		name: "flow-syn-up-again", what: "a client's SYN and a forged one replace each other again and again",
		file: "flow/worker.go", old: "if bpf.ProtocolOf(p.protocol) != service.UDP && !w.giveWay(&key, now) {",
		new: "if f := w.asking[key]; f != nil && func() bool { f.replaced(now); return false }() {",
		pkg: "test/e2e", test: "TestForgedSYNsTakeNoConnection/kernel",
	},
	{
		name: "flow-syn-unacknowledged", what: "a forged SYN takes over a connection to the endpoint itself",
		file: "flow/bpf/track.h", old: "== (SYN | ACK) && acknowledges_syn(p, f);", new: "== (SYN | ACK);",
		pkg: "test/e2e", test: "TestForgedSYNsTakeNoConnection/kernel",
	},
	{
		name: "flow-unheard-believed", what: "a forged datagram takes over a session",
		file: "flow/bpf/track.h", old: "if (is_unheard(skb, f))", new: "if (0)",
		pkg: "flow", test: "TestForgedDatagramsTakeNoSession",
	},
	{
		name: "flow-unheard-on-node", what: "an endpoint on the node that answers by another interface is not heard",
		file: "flow/bpf/track.h", old: "return skb->ingress_ifindex ? LEAVE : collide(skb, f, index);", new: "return LEAVE;",
		pkg: "flow", test: "TestAnswerByAnotherInterface",
	},
	{
		name: "flow-fin-counted", what: "a record counts a FIN as a byte",
		file: "flow/bpf/track.h", old: "if (!(f->seen & fin)) // a FIN", new: "if (1) // a FIN",
		pkg: "flow/bpf", test: "TestModelOfConnections",
	},
	{
		name: "flow-open-checksum", what: "checksums that a device completes are wrong",
		file: "flow/bpf/translate.h", old: "flags |= BPF_F_PSEUDO_HDR;", new: "",
		pkg: "flow/bpf", test: "TestModelOfDevices",
	},
	{
		name: "sctp-crc-kept", what: "an SCTP packet's CRC does not follow translated ports",
		file: "flow/bpf/sctp.h", old: "	crc ^= little_endian(change);", new: "",
		pkg: "flow", test: "TestAssociationPassesTheKernel",
	},
	{
		name: "sctp-addresses-kept", what: "an endpoint of SCTP learns its client's other addresses, which pass the node by",
		file: "flow/bpf/sctp.h", old: "if (type == PARAMETER_IPV4 || type == PARAMETER_IPV6) {", new: "if (0) {",
		pkg: "flow", test: "TestClientWithSeveralAddresses",
	},
	{
		name: "sctp-abort-believed", what: "anybody ends an association by an ABORT with any tag",
		file: "flow/bpf/association.h", old: "	if (tag != (p->chunks & REFLECTED ? f->way[!from].end : f->way[from].end))\n		return;\n", new: "",
		pkg: "flow/bpf", test: "TestModelOfPackets",
	},
	{
		name: "sctp-client-lost", what: "a client of SCTP that comes back with its port reaches nobody if its endpoint has left",
		file: "flow/dial.go", old: "		if f.isAlone() {", new: "		if false {",
		pkg: "flow", test: "TestClientOfAnAssociationComesBack",
	},
	{
		name: "sctp-client-not-told", what: "a client of SCTP is not told that no endpoint is left",
		file: "flow/dial.go", old: "		f.worker.injector.abort(abort{from: from, to: to, tag: k.FirstSequence})\n", new: "",
		pkg: "flow", test: "TestAllEndpointsOfAnAssociationDead",
	},
	{
		name: "flow-programs-end-with-us", what: "a killed proxy's programs leave the interfaces",
		file: "flow/attach/hook.go", old: "if err := l.Pin(path); err != nil {", new: "if err := error(nil); err != nil {",
		pkg: "test/e2e", test: "TestPromise7_KilledProxyCutsNoForwardedConnection",
	},
	{
		name: "flow-replaced-lost", what: "flows of a Service whose balancer changes do not follow its later changes",
		file: "flow/path.go", old: "if old != nil {", new: "if false {",
		pkg: "flow", test: "TestReplacedServiceKeepsItsDestinationsAndSessions",
	},
	{
		name: "flow-handshake-unended", what: "a client whose handshake an operator ends is not told",
		file: "flow/end.go", old: "	default:\n		f.refuse()", new: "	default:",
		pkg: "flow", test: "TestOperatorEndsFlows",
	},
	{
		name: "flow-stop-silent", what: "connections that a stop cuts are not reset",
		file: "flow/stop.go", old: "				f.resetBoth()", new: "",
		pkg: "flow", test: "TestStopResetsConnections",
	},
	{
		name: "flow-no-retry", what: "a refused SYN goes to no other endpoint",
		file: "flow/dial.go", old: "	f.abandon(why, false, now)", new: "	f.record.AttemptFailed(why, now)\n	f.fail()",
		pkg: "flow", test: "TestDeadEndpointIsRetriedInTheHandshake",
	},
	{
		name: "flow-collision-lost", what: "a SYN whose ports another flow has is lost if other packets are sent before it",
		file: "flow/inject.go", old: "if f != nil && f.collided() {", new: "if f != nil && tries > 0 && f.collided() {",
		pkg: "flow", test: "TestCollisionBehindAnotherPacket",
	},
	{
		name: "flow-evicts-busy", what: "a new UDP session replaces one that is in use",
		file: "flow/room.go", old: "if f.isEvictable(now) {", new: "if f.isUDP() {",
		pkg: "flow", test: "TestNewSessionsReplaceQuietOnes",
	},
	{
		name: "flow-notice-overtaken", what: "a flow that an endpoint refused is lost where its notice is still to be read",
		file: "flow/dial.go", old: "		w.loop.Schedule(&f.timer, now+int64(2*noticeInterval), f)\n		return\n", new: "		f.lost(now)\n		return\n",
		pkg: "flow", test: "TestRefusalOvertakesNoNotice",
	},
	{
		name: "flow-refused-twice", what: "a second datagram's refusal gives up the next endpoint too",
		file: "flow/dial.go", old: "if e.Attempt != uint32(f.shared().Attempts) {", new: "if false {",
		pkg: "flow", test: "TestRefusalHidesTheClient",
	},
	{
		name: "flow-refused-bare", what: "datagrams behind one that was refused show a hidden client",
		file: "flow/dial.go", old: "		w.kernel.Index.Erase(f.index, h.key)\n", new: "",
		pkg: "flow", test: "TestMoveHidesTheClient",
	},
	{
		name: "flow-retired-bare", what: "a session that ends shows a hidden client",
		file: "flow/dial.go", old: "x.Erase(f.index, f.wayThere())", new: "x.Erase(f.index, append(x.EndpointTuples(f.index, nil)[1:], f.wayThere())...)",
		pkg: "flow", test: "TestEndOfSessionHidesTheClient",
	},
	{
		name: "flow-hidden-still", what: "an ended session hides a client that the endpoint may see",
		file: "flow/bpf/inject.h", old: "if (role_in(old) == MASQUERADE)", new: "if (0)",
		pkg: "flow", test: "TestEndedSessionHidesNobody",
	},
	{
		name: "flow-reply-ports-asked", what: "a client on one of the relay's reply ports is not served while userspace is away",
		file: "flow/bpf/table.h", old: "is_reply_port(c, port) ? other_port(port) : port", new: "port",
		pkg: "flow", test: "TestClientsOnReplyPorts",
	},
	{
		name: "flow-replaced-twice", what: "a closed connection whose client begins another one is released twice",
		file: "flow/worker.go", old: "f.endClosed(f.worker", new: "f.closed(f.worker",
		pkg: "flow", test: "TestReplacedFlowIsReleasedOnce",
	},
	{
		name: "flow-ports-run-out", what: "a UDP session whose ports are all taken loses its datagram",
		file: "flow/inject.go", old: "f.clearWay(poll.Nanotime())", new: "_ = poll.Nanotime()",
		pkg: "flow", test: "TestSessionsTakeThePortsOfQuietOnes",
	},
	{
		name: "replies-end-early", what: "replies stop to come back as a socket opens",
		file: "redirect/mode/demand.go", old: "if d.sockets.Load() > 0 {", new: "if false {",
		pkg: "redirect/mode", test: "TestDemandEndsForNoOpenSocket",
	},
	{
		name: "flow-replaced-deletes", what: "a connection that has ended takes the tuples of the next one from the same port",
		file: "flow/bpf/index.go", old: "Reference(slot).Flow() == flow && ", new: "",
		pkg: "flow/bpf", test: "TestIndexModel",
	},
	{
		name: "flow-vacates-half", what: "the way back of a connection stays when the table begins another one from the same port",
		file: "flow/bpf/table.h", old: "	exchange(&t, reference(index, TO_CLIENT), 0);\n	if (f->", new: "	if (f->",
		pkg: "flow", test: "TestPortIsUsedAgainAtOnce",
	},
	{
		name: "flow-passage-kept", what: "programs of others find our sign in packets",
		file: "flow/bpf/flow.bpf.c", old: "	if (is_translated(skb))\n		skb->tc_index = 0;\n", new: "",
		pkg: "flow", test: "TestTcIndexIsGivenBack",
	},
	{
		name: "flow-passage-hides-nobody", what: "the endpoint sees a client that is to be hidden",
		file: "flow/bpf/flow.bpf.c", old: "(role == TO_ENDPOINT && (f->options & OPTION_MASQUERADE))", new: "0",
		pkg: "flow", test: "TestMasquerade",
	},
	{
		name: "flow-index-leaks", what: "a flow without room for one of its tuples leaves the others",
		file: "flow/bpf/inject.h", old: "exchange(&t, reference(index, role), 0);", new: "",
		pkg: "flow", test: "TestNoRoomInTheIndex",
	},
	{
		name: "flow-index-one-bucket", what: "tuples are not found whose first place was full",
		file: "flow/bpf/index.h", old: "if (unlikely(!found && b->moved)) {", new: "if (0) {",
		pkg: "flow/bpf", test: "TestModelOfPackets",
	},
	{
		name: "flow-stale-forgotten", what: "late answers of an endpoint that was given up reach the client",
		file: "flow/dial.go", old: "		f.keepStale()\n", new: "",
		pkg: "flow", test: "TestLateAnswerIsRefused",
	},
	{
		name: "flow-no-shares", what: "one Service may have all flows",
		file: "flow/worker.go", old: "serviceShare, spareShare = 2, 8", new: "serviceShare, spareShare = 1, 8",
		pkg: "test/e2e", test: "TestPromise8_FloodOfForwardedClientsSlowsNoOther",
	},
	{
		name: "flow-parked-forgets", what: "the record of a connection that was open for a while does not say how long its endpoint took",
		file: "flow/parked.go", old: "r.Connected, r.ConnectTime = true, f.connectTime(r.Start)", new: "r.Connected = true",
		pkg: "flow", test: "TestOpenConnectionIsParked",
	},
	{
		name: "flow-reset-final", what: "a forged RST that nobody believed ends a connection that goes on",
		file: "flow/lingering.go", old: "last+int64(q.wait) > now {", new: "last > now {",
		pkg: "flow", test: "TestForgedResetCutsNoBusyConnection",
	},
	{
		name: "flow-table-any-client", what: "the table lets endpoints see the address of clients that are no pods",
		file: "flow/bpf/table.h", old: "(pod ? HIDE_PODS : HIDE_OTHERS)", new: "0",
		pkg: "flow/bpf", test: "TestModelOfPackets",
	},
	{
		name: "flow-table-untold", what: "userspace does not hear of flows that the table decides about",
		file: "flow/adopt.go", old: "	path.ready = true\n", new: "",
		pkg: "flow", test: "TestConnectionPassesTheKernel",
	},
	{
		name: "flow-table-forgotten", what: "connections that began while no process ran leave no record",
		file: "flow/adopt.go", old: "w.discover(uint32(i))", new: "_ = i",
		pkg: "flow", test: "TestNewConnectionsWhileNobodyRuns",
	},
	{
		name: "flow-table-trusts", what: "the table goes on to choose an endpoint that has just failed",
		file: "flow/begun.go", old: "w.server.askUntil(s.load, w.kernelTime(now+int64(balancer.Distrust)))", new: "_, _, _ = w, now, balancer.Distrust",
		pkg: "flow", test: "TestFailureLeavesTheDecisionToUserspace",
	},
	{
		name: "flow-pins-of-another", what: "a proxy adopts what was forwarded in a network namespace that is gone",
		file: "flow/bpf/pins.go", old: "if c.Netns != p.Netns {", new: "if false {",
		pkg: "flow", test: "TestPinsOfAnEarlierNamespaceAreNotAdopted",
	},
	{
		name: "flow-fin-at-a-gap", what: "a FIN counts only while the gap before it is open",
		file: "flow/bpf/track.h", old: "gone_ahead || p->ack == f->fin[!from]", new: "gone_ahead",
		pkg: "flow", test: "TestEndBehindAGapIsSeen",
	},
	{
		name: "flow-reset-behind-a-gap", what: "nobody asks what has become of a connection that was reset behind a gap",
		file: "flow/bpf/track.h", old: "CLIENT_RST_DOUBTED);\n			challenge(skb, f, index);", new: "CLIENT_RST_DOUBTED);",
		pkg: "flow", test: "TestEndBehindAGapIsSeen",
	},
	{
		name: "flow-reset-first", what: "nobody asks about an RST that comes by before the data in front of it",
		file: "flow/bpf/track.h", old: "f->state == OPEN && p->sequence - f->way[!from].acked < LARGEST_WINDOW",
		new: "(f->seen & (from ? ENDPOINT_AHEAD : CLIENT_AHEAD)) && p->sequence - f->ahead[from] <= 1",
		pkg: "flow", test: "TestResetBeforeItsDataIsSeen",
	},
	{
		name: "flow-second-end", what: "a record names the second end of a connection where segments overtake each other",
		file: "flow/bpf/track.h", old: "	// Nobody acknowledges what was not sent.\n", new: "	if (ends)\n		mark_end(f, fin);\n",
		pkg: "flow", test: "TestEndThatIsAcknowledgedCameFirst",
	},
	{
		name: "flow-reset-while-nobody-asks", what: "nobody asks about an RST that has come during a take-over",
		file: "flow/adopt.go", old: "f != nil && f.seen()&(bpf.KernelSeenCLIENT_RST_DOUBTED|", new: "f != nil && f.seen()&(bpf.KernelSeenRECORDED & 0|",
		pkg: "flow", test: "TestResetBeforeItsDataIsSeen",
	},
	{
		name: "flow-first-again", what: "a handshake whose SYN the process before had ends with the first refusal",
		file: "flow/begun.go", old: "f.protocol == service.TCP && f.handshake != nil &&", new: "false &&",
		pkg: "flow", test: "TestHandshakesGoOnInTheNextProcess",
	},
	{
		name: "flow-first-absorbed", what: "nobody hands up the SYN that a process has lost",
		file: "flow/bpf/track.h", old: "(f->seen & FIRST_WANTED) && is_single", new: "0 && is_single",
		pkg: "flow", test: "TestHandshakesGoOnInTheNextProcess",
	},
	{
		name: "flow-reset-asks-the-client", what: "after an endpoint's RST behind a gap, the client is asked",
		file: "flow/dial.go", old: "uint32(bpf.KernelSeenENDPOINT_RST_DOUBTED) != 0:", new: "uint32(bpf.KernelSeenENDPOINT_RST_DOUBTED) > 1<<31:",
		pkg: "flow", test: "TestEndBehindAGapIsSeen",
	},
	{
		name: "flow-unbound-ports", what: "the kernel forwards what comes to a node port that another program holds",
		file: "flow/table.go", old: " || st.host.Has(d.Addr) && !p.bound[d]", new: "",
		pkg: "flow", test: "TestPortOfAnotherProgramIsLeftToIt",
	},
	{
		name: "flow-counts-packets", what: "records of UDP sessions count fragments, and packets of many datagrams, instead of datagrams",
		file: "flow/bpf/track.h", old: "__sync_fetch_and_add(&d->packets, p->messages);", new: "__sync_fetch_and_add(&d->packets, 1);",
		pkg: "flow", test: "TestRecordsCountDatagrams",
	},
	{
		name: "flow-others-twice", what: "datagrams that are queued when their endpoint is given up reach the next one twice",
		file: "flow/dial.go", old: "		f.worker.injector.flush() // what", new: "		// what",
		pkg: "flow", test: "TestQueuedDatagramIsSentAgainOnce",
	},
	{
		name: "flow-others-overtaken", what: "a datagram that was sent just before its endpoint was given up is lost",
		file: "flow/unanswered.go", old: "f.worker.loopTime(e.Time) < h.resent", new: "false",
		pkg: "flow", test: "TestDatagramJustBeforeARefusalIsSentAgain",
	},
	{
		name: "flow-sink-closed", what: "a UDP session goes on with a closed endpoint that has never answered",
		file: "flow/dial.go", old: "if f.handshake == nil && f.isUDP() && f.state() == bpf.KernelStateASKING", new: "if false",
		pkg: "flow", test: "TestClientLeavesAClosedEndpointThatNeverAnswered",
	},
	{
		name: "flow-of-another", what: "a connection that waits goes on with the endpoints of whichever Service has its address by then",
		file: "flow/dial.go", old: " || f.isOfAnother(v.Port)", new: "",
		pkg: "flow", test: "TestAddressOfAnotherServiceEndsTheHandshake",
	},
	{
		name: "flow-others-dropped", what: "of the datagrams that a closed endpoint refuses, only the first one reaches the next endpoint",
		file: "flow/unanswered.go", old: "	for _, d := range h.others {\n		i.put", new: "	for _, d := range h.others[:0] {\n		i.put",
		pkg: "flow", test: "TestDatagramsBeforeARefusalAreSentAgain",
	},
	{
		name: "flow-trial-believes", what: "programs that translate nothing pass their trial",
		file: "flow/trial.go", old: "err == nil && (verdict != step.verdict ||", new: "err == nil && false && (verdict != step.verdict ||",
		pkg: "flow", test: "TestTrial",
	},
	{
		name: "flow-right-missing", what: "nobody says which right kernel flows lack",
		file: "flow/trial.go", old: "sys.Missing(sys.NetAdmin, sys.BPF, sys.Perfmon, sys.NetRaw)", new: "sys.Missing(sys.NetAdmin)",
		pkg: "test/e2e", test: "TestDeployedRights",
	},
	{
		name: "flow-changes-lost", what: "after a burst of changes, new interfaces are found late until the process ends",
		file: "flow/attach/interfaces.go", old: "				begin = time.After(changesPause)\n", new: "",
		pkg: "flow/attach", test: "TestChangesAfterALoss",
	},
	{
		name: "flow-programs-of-others", what: "a pinned program is taken over that uses other maps",
		file: "flow/bpf/programs.go", old: " || !k.isUsedBy(program)", new: "",
		pkg: "flow/bpf", test: "TestProgramsOfTheSameBuildAreTakenOver",
	},
	{
		name: "flow-table-limited", what: "the table ignores who is hidden from endpoints (A3.8)",
		file: "policy/uniform.go", old: "t.node.masqueradeAll, t.node.masqueradeAll || ", new: "false, ",
		pkg: "policy", test: "TestUniformIsWhatResolveSays",
	},
	{
		name: "node-clients-martian", what: "the device drops packets from the node's own addresses",
		file: "flow/device.go", old: "conf.AddRtAttr(acceptLocal, nl.Uint32Attr(1))", new: "conf.AddRtAttr(acceptLocal, nl.Uint32Attr(0))",
		pkg: "flow", test: "TestNodeClientsBesideLooseSourceChecks",
	},
	{
		name: "node-clients-loose-check", what: "the device has no address, so that loose source checks drop answers",
		file: "flow/device.go", old: "if err := d.nl.AddrReplace(link, addr); err != nil {", new: "if err := d.nl.AddrReplace(link, addr); err == nil {\n\t\t_ = d.nl.AddrDel(link, addr)\n\t} else {",
		pkg: "flow", test: "TestNodeClientsBesideLooseSourceChecks",
	},
	{
		name: "node-clients-past-rules", what: "rules that judge the node's own packets do not have its clients relayed",
		file: "flow/bypass/others.go", old: "Relayed: o.onNode.Judges,", new: "Relayed: \"\",",
		pkg: "flow", test: "TestNodeClientsAreRelayed",
	},
	{
		name: "node-clients-beside-no-rules", what: "any rules of others have the node's own clients relayed",
		file: "flow/bypass/others.go", old: "Relayed: o.onNode.Judges,", new: "Relayed: o.chain,",
		pkg: "flow", test: "TestNodeClientsBesideAClustersRules",
	},
	{
		name: "node-clients-unmasqueraded", what: "endpoints see another address of the node than the one that rules masquerade to",
		file: "flow/bpf/table.h", old: " || (c->hides & HIDES_NODE)", new: "",
		pkg: "flow", test: "TestNodeClientsBesideAClustersRules",
	},
	{
		name: "node-clients-table-fragments", what: "the table lets rules for forwarded packets judge long datagrams of the node's own clients",
		file: "flow/bpf/node.h", old: "(c->hides & ASKS_NODE_UDP)", new: "(c->hides & 0)",
		pkg: "flow", test: "TestNodeClientsBesideRulesForForwardedPackets",
	},
	{
		name: "node-clients-always-asked", what: "userspace decides about each connection of the node's own clients",
		file: "flow/table.go", old: "if u.OfNode && ", new: "if !u.OfNode && ",
		pkg: "flow", test: "TestNodeClientsAreTheTables",
	},
	{
		name: "node-clients-table-hides", what: "the table shows endpoints the node's own clients, whatever policy says",
		file: "flow/bpf/table.h", old: "*hidden = hides || itself || !o", new: "*hidden = itself || !o",
		pkg: "flow", test: "TestNodeClientsAreTheTables",
	},
	{
		name: "node-clients-by-the-service", what: "userspace decides about the node's own clients whose address the kernel chooses",
		file: "flow/bpf/table.h", old: "(itself && !own)", new: "itself",
		pkg: "flow", test: "TestNodeClientsAreTheTables",
	},
	{
		name: "node-clients-unknown", what: "the table takes the node's addresses for others' and hides its clients",
		file: "flow/table.go", old: "p.IsSingleIP() && host.Has(p.Addr())", new: "false",
		pkg: "flow", test: "TestNodeClientsAreTheTables",
	},
	{
		name: "node-clients-local-policy", what: "the table has policy Local keep the node's own clients from other nodes' endpoints (A3.6)",
		file: "policy/uniform.go", old: "d.kind == service.ClusterIP || !d.is(local)", new: "true",
		pkg: "policy", test: "TestUniformIsWhatResolveSays",
	},
	{
		name: "node-clients-fragments-dropped", what: "rules for forwarded packets judge long datagrams of the node's own clients",
		file: "flow/node.go", old: "|| s.path.protocol == service.UDP && w.server.node.Load().noFragments.Load()", new: "",
		pkg: "flow", test: "TestNodeClientsBesideRulesForForwardedPackets",
	},
	{
		name: "node-clients-jumps", what: "rules of chains that others lead to judge nothing of the node's own",
		file: "host/firewall/node.go", old: "		l.chain(kernel.Text(kernel.Attribute(v, attrChain)))\n", new: "",
		pkg: "host/firewall", test: "TestReadOnNode",
	},
	{
		name: "node-clients-loopback", what: "clients at a loopback address get no answers by the device",
		file: "flow/bpf/node.h", old: " || is_loopback(p))", new: ")",
		pkg: "flow", test: "TestNodeClientsAreRelayed",
	},
	{
		name: "node-clients-tracked", what: "connection tracking sees the answers to the node's own clients, and nothing else of them",
		file: "redirect/tproxy/rules.go", old: "	needs(o.tracking, isFrom(n.device), untracked)\n", new: "",
		pkg: "test/e2e", test: "TestNodeClientsBesideTheKubeletsRules",
	},
	{
		name: "node-clients-device-lost", what: "a device that another program removes does not come again",
		file: "flow/node.go", old: "err = errors.Join(err, n.device.make())", new: "err = errNoShortcut",
		pkg: "flow", test: "TestNodeClientsGetTheirDeviceAgain",
	},
	{
		name: "node-clients-own-endpoint", what: "the node's own clients are not relayed to an endpoint on the node",
		file: "flow/node.go", old: "e.MayReturn || st.host.Has(e.Addr.Addr())", new: "e.MayReturn",
		pkg: "flow", test: "TestNodeClientsAreRelayed",
	},
	{
		name: "node-clients-unfragmented", what: "long datagrams of the node's own clients are not fragmented",
		file: "flow/bpf/node.h", old: "if (status == TOO_LONG) {", new: "if (status == TOO_LONG)\n\t\treturn TCX_DROP;\n\tif (0) {",
		pkg: "flow", test: "TestNodeClientsAndThePathMTU",
	},
	{
		name: "node-clients-take-ports", what: "a client on the node gets the answers to the node's own connection from its port",
		file: "flow/bpf/direct.h", old: "|| has_socket(skb, &back, p->ipv6));", new: "|| !has_socket(skb, &back, p->ipv6));",
		pkg: "flow", test: "TestNodeAsksAnEndpointByANodeClientsPort",
	},
	{
		name: "node-clients-again-at-a-port", what: "a bridge's port takes the packets of a client on the node for the node's own",
		file: "flow/bpf/direct.h", old: "|| has_socket(skb, &back, p->ipv6));", new: "|| (has_socket(skb, &back, p->ipv6) | skb->len));",
		pkg: "flow", test: "TestNodeClientsOfEndpointsBehindOtherLinks",
	},
	{
		name: "node-clients-syn-again-at-a-port", what: "a bridge's port takes the SYN of a client on the node for another one's",
		file: "flow/bpf/direct.h", old: " || (p->tuple.protocol == IPPROTO_TCP && p->sequence == f->first_sequence))", new: ")",
		pkg: "flow", test: "TestNodeClientsOfEndpointsBehindOtherLinks",
	},
	{
		name: "node-clients-device-stays", what: "the device of the node's own clients stays behind",
		file: "flow/node.go", old: "_ = n.device.nl.LinkDel(l)", new: "_ = l",
		pkg: "flow", test: "TestNodeClientsAreAdopted",
	},
}
