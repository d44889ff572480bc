package main

// promises are the mistakes that a test has to notice. Each end-to-end test of a
// promise in the README has at least one, and so has each cleverness that no promise
// names. Keep old texts short: they have to be changed with the code.
var promises = []mutation{
	// Promise 1: a dead endpoint costs a moment, never the connection.
	{
		name: "retry-same-endpoint", what: "a retry may go to the endpoint that has just failed",
		file: "balancer/pick.go", old: "!b.suspected(key, now) && !d.wasTried(key)", new: "!b.suspected(key, now)",
		pkg: "balancer", test: "TestEveryCandidateOnceBeforeAnyTwice",
	},
	{
		name: "no-retry", what: "a connection is given up when its first endpoint does not answer",
		file: "stream/conn.go", old: "if !c.attemptFailed(reason) {\n\t\tc.retryInTurn()", new: "if !c.attemptFailed(reason) {\n\t\tc.fail(conntrack.ConnectFailed)",
		pkg: "test/e2e", test: "TestPromise1_OneLiveEndpointOfManyIsFound",
	},
	{
		name: "no-dial-timeout", what: "an attempt at a silent endpoint is never given up",
		file: "stream/conn.go", old: "		c.abandonAttempt(c.silence())\n		return\n", new: "		w := c.worker\n		w.loop.Schedule(&c.timer, w.loop.Now()+1e9, c)\n		return\n",
		pkg: "test/e2e", test: "TestPromise1_DeadEndpointCostsAMomentNeverTheConnection",
	},
	{
		name: "failures-forgotten", what: "each connection finds out anew that an endpoint is dead",
		file: "balancer/balancer.go", old: "b.suspect(ep, d.listBits, now)", new: "",
		pkg: "test/e2e", test: "TestPromise1_DroppingEndpointDelaysFewConnections",
	},
	{
		name: "restart-not-waited-for", what: "a connection ends when all endpoints have refused once",
		file: "balancer/pick.go", old: "ok && at > now", new: "false && ok",
		pkg: "test/e2e", test: "TestPromise1_RestartOfTheOnlyEndpointFailsNoConnection",
	},
	{
		name: "affinity-ignored", what: "a pinned client goes to any endpoint",
		file: "balancer/pins.go", old: "i >= 0 && !d.wasTried(", new: "i < -1 && !d.wasTried(",
		pkg: "test/e2e", test: "TestAffinityHoldsAndMoves/leaves",
	},

	{
		name: "rank-ignored", what: "each node begins round-robin at random",
		file: "balancer/rank.go", old: "\tif known == 0 {", new: "\tif known >= 0 {",
		pkg: "balancer", test: "TestNodesSpreadFewConnections",
	},
	{
		name: "load-never-ends", what: "an endpoint counts connections that have ended",
		file: "conntrack/record.go", old: "\t\tr.load.End()\n", new: "",
		pkg: "test/e2e", test: "TestAlgorithms/relay",
	},
	{
		name: "least-but-one", what: "an endpoint that has one connection more counts as equal",
		file: "balancer/least.go", old: "n < open {", new: "n < open-1 {",
		pkg: "balancer", test: "TestLeastLoadedAgreesWithTheModel",
	},
	{
		name: "resets-are-blamed-on-nobody", what: "an endpoint that resets each connection keeps its share",
		file: "conntrack/shard.go", old: "r.load != nil && r.Connected", new: "false",
		pkg: "test/e2e", test: "TestEndpointThatResetsIsEjected/kernel",
	},
	{
		name: "affinity-forgotten", what: "clients get another endpoint after a take-over, session affinity or not",
		file: "node/takeover.go", old: "\tp.learn(b.sockets.States)\n", new: "",
		pkg: "test/e2e", test: "TestPromise7_AffinityMoves/relay",
	},
	{
		name: "broken-manifest-forgotten", what: "a take-over ends the Services of a manifest that is broken meanwhile",
		file: "node/open.go", old: "p.manifests.Inherit(p.askKept)", new: "_ = p.askKept",
		pkg: "test/e2e", test: "TestPromise7_GoodContentOfBrokenManifestsMoves",
	},
	{
		name: "end-does-not-wait", what: "a node is without a proxy while the next one waits for its API server",
		file: "node/handover.go", old: "patience := p.config.TakeOverTimeout", new: "patience := time.Millisecond",
		pkg: "node", test: "TestTakeOverWithoutTheAPIServer",
	},
	{
		name: "started-by-others", what: "an update goes on while the next pod has not taken over",
		file: "redirect/lock.go", old: "listens && holder.PID != 0 && ", new: "listens && ",
		pkg: "test/e2e", test: "TestStarted",
	},
	{
		name: "part-of-a-line", what: "the next process's first record is joined to what a full disk has left of another one",
		file: "conntrack/log.go", old: "!l.cutLocked(len(part))", new: "len(part) > 0",
		pkg: "test/e2e", test: "TestTakeOverWithAFullDisk",
	},
	{
		name: "adoption-prolongs", what: "processes that follow each other soon keep idle connections and UDP sessions for ever",
		file: "flow/adopt.go", old: "w.loop.Schedule(&f.timer, now, f)", new: "w.loop.Schedule(&f.timer, now+int64(confirmation), f)",
		pkg: "flow", test: "TestAdoptedFlowsEndInTime",
	},
	{
		name: "next-cuts-flows", what: "a process that cannot have kernel flows takes over, and cuts what the running one forwards",
		file: "node/handover.go", old: "Flows: p.hasFlows.Load()", new: "Flows: false",
		pkg: "test/e2e", test: "TestPromise7_ForwardedConnectionsOutliveALesserProcess",
	},
	{
		name: "totals-fall", what: "who reads the metrics sees totals fall at each take-over",
		file: "node/handover.go", old: "p.tellTotals(p.successor)", new: "error(nil)",
		pkg: "test/e2e", test: "TestPromise7_TotalsDoNotFall/relay",
	},
	{
		name: "ids-begin-anew", what: "after a take-over, two records have one id",
		file: "node/handover.go", old: "p.conntrack.NextID()+idsSpace", new: "uint64(1)",
		pkg: "test/e2e", test: "TestPromise7_ThePastMoves",
	},
	{
		name: "endpoints-forgotten", what: "after a take-over, an endpoint that keeps failing gets connections again, and turns begin anew",
		file: "node/handover.go", old: "err = p.tellLearnt(c)", new: "_ = p.tellLearnt",
		pkg: "test/e2e", test: "TestPromise7_WhatEndpointsDidMoves/relay",
	},
	{
		name: "next-chooses-again", what: "a process that takes over steers otherwise than the running one, whose connections are cut",
		file: "node/open.go", old: "modes.Running = running.Mode;", new: "modes.Running = \"\";",
		pkg: "test/e2e", test: "TestNextSteersAsTheRunningOne/tproxy-nftables",
	},
	{
		name: "signal-ends-a-take-over", what: "a signal to end cuts off the process that takes over",
		file: "node/loop.go", old: "p.untilHandedOver(ctx)", new: "context.WithCancel(ctx)",
		pkg: "node", test: "TestEndWaitsForATakeOver",
	},
	{
		name: "next-is-no-main-process", what: "systemd ends the next process with the one before, and starts another",
		file: "node/handover.go", old: "\tp.nameNext(c)\n\tp.successor = c\n", new: "\tp.successor = c\n",
		pkg: "node", test: "TestServiceManagerIsTold",
	},
	{
		name: "held-for-ever", what: "connections that wait for endpoints are not told of the first one",
		file: "stream/server.go", old: "\ts.wakeHeld()\n", new: "",
		pkg: "test/e2e", test: "TestHeldConnections/relay",
	},
	{
		name: "unrecorded-wait", what: "records do not say how long a connection waited for an endpoint",
		file: "conntrack/record.go", old: "r.setWaited(r.waited() + (now - r.Start))", new: "r.setWaited(0)",
		pkg: "test/e2e", test: "TestHeldConnections/relay",
	},
	{
		name: "no-slow-start", what: "a new endpoint has its full share at once",
		file: "balancer/slowstart.go", old: "\t\t\t\tsince = now\n", new: "\t\t\t\tsince = 0\n",
		pkg: "test/e2e", test: "TestSlowStart/relay",
	},
	{
		name: "slow-start-by-address", what: "a new pod at an old address has its full share at once",
		file: "balancer/slowstart.go", old: "if e.PodUID != (service.UID{}) {", new: "if false {",
		pkg: "balancer", test: "TestSlowStartOfPods",
	},
	{
		name: "place-needs-a-node", what: "an endpoint whose node is unknown loses its zone",
		file: "service/place.go", old: "node == \"\" && zone == \"\"", new: "node == \"\"",
		pkg: "service", test: "TestPlace",
	},
	{
		name: "uid-with-a-tail", what: "UIDs of pods that begin alike are the same",
		file: "service/uid.go", old: "len(text) != 36", new: "len(text) < 36",
		pkg: "service", test: "TestUIDsDiffer",
	},
	{
		name: "uid-as-bytes", what: "UIDs of pods pass to an older process as bytes",
		file: "service/uid.go", old: "return []byte(u.String()), nil", new: "return u[:], nil",
		pkg: "service", test: "TestUIDPassesAsText",
	},
	{
		name: "table-decides-in-slow-start", what: "the kernel's table decides while an endpoint starts",
		file: "flow/table.go", old: "if left := s.balancer.StartsUntil() - poll.Nanotime(); left > 0 {", new: "if left := s.balancer.StartsUntil() - poll.Nanotime(); left < 0 {",
		pkg: "test/e2e", test: "TestSlowStart/kernel",
	},
	{
		name: "full-endpoints-are-taken", what: "sluice.dev/max-connections-per-endpoint has no effect",
		file: "balancer/pick.go", old: "return c.most > 0 && c.loads.Of(ep).Open() >= c.most", new: "return false",
		pkg: "balancer", test: "TestFullEndpoints",
	},
	{
		name: "queue-out-of-order", what: "the last connection that waits at a limit is served first",
		file: "stream/queue.go", old: "append(c.pool.waiting, queued{conn: c, worker: c.worker})", new: "slices.Insert(c.pool.waiting, 0, queued{conn: c, worker: c.worker})",
		pkg: "stream", test: "TestQueueIsInOrder",
	},
	{
		name: "clients-that-left-wait", what: "clients that leave while they wait keep their place",
		file: "stream/hold.go", old: "case ev&poll.PeerDone != 0 &&", new: "case false &&",
		pkg: "stream", test: "TestHeldClientsLeave",
	},
	{
		name: "half-closed-clients-leave", what: "a client that has sent its request and a FIN loses it while it waits",
		file: "stream/hold.go", old: " && !c.carrier.hasAsked():", new: ":",
		pkg: "stream", test: "TestHeldClientsLeave",
	},
	{
		name: "nothing-departs", what: "connections stay with an endpoint that went, whatever sluice.dev/drain says",
		file: "node/departed.go", old: "p.left[a] = now", new: "_ = now",
		pkg: "node", test: "TestDeparted",
	},
	{
		name: "drained-too-early", what: "connections are reset before the time of sluice.dev/drain has passed",
		file: "node/departed.go", old: "if !now.Before(at.Add(p.port.Drain)) {", new: "if !now.Before(at) {",
		pkg: "node", test: "TestDeparted",
	},
	{
		name: "departed-grow", what: "endpoints that a tenant lists and removes for a day fill the memory",
		file: "node/departed.go", old: "clear(p.left)", new: "_ = p.left",
		pkg: "node", test: "TestDepartedIsBounded",
	},
	{
		name: "drain-forgets-adopted-flows", what: "flows of a killed process stay with endpoints that went meanwhile",
		file: "node/departed.go", old: "o.stays = serving(p.port)", new: "continue",
		pkg: "test/e2e", test: "TestDrainAnnotationAfterARestart",
	},
	{
		name: "rebalance-cuts-what-is-under-way", what: "a connection whose bytes are not acknowledged yet is closed for new endpoints",
		file: "relay/idle.go", old: "d.Pending || e != 0", new: "d.Pending && e != 0",
		pkg: "relay", test: "TestIdle",
	},
	{
		name: "rebalance-resets", what: "idle connections are reset for new endpoints, not closed in order",
		file: "relay/link.go", old: " || end == Released", new: "",
		pkg: "relay", test: "TestIdle",
	},
	{
		name: "rebalance-closes-all", what: "idle connections are closed although their clients will not come back",
		file: "node/rebalance.go", old: "all := max(p.open[f], open)", new: "all := open",
		pkg: "node", test: "TestShares",
	},
	{
		name: "wrong-annotation-passed-on", what: "an annotation with a wrong value, which is a problem of its Service, is read all the same",
		file: "service/spec.go", old: "				delete(s.annotations, name)\n", new: "",
		pkg: "node", test: "TestWrongAnnotationsCountAsMissing",
	},
	{
		name: "rebalance-in-vain", what: "idle connections are closed though all clients get the same endpoint",
		file: "node/rebalance.go", old: " || !options.Algorithm.SpreadsClients() {", new: " {",
		pkg: "node", test: "TestShares",
	},
	{
		name: "rebalance-at-once", what: "connections are closed although no endpoint came, only the annotation",
		file: "node/rebalance.go", old: "; came && known {", new: "; came {",
		pkg: "node", test: "TestShares",
	},
	{
		name: "rebalance-put-off", what: "changes in quick succession put the closing of idle connections off for ever",
		file: "node/rebalance.go", old: "if !b.ticks {", new: "if true {",
		pkg: "node", test: "TestChangesPutNoStepOff",
	},
	{
		name: "rebalance-once", what: "idle connections are closed after the first endpoints that come, and never again",
		file: "node/rebalance.go", old: "\tb.ticks = false\n", new: "",
		pkg: "node", test: "TestChangesPutNoStepOff",
	},
	{
		name: "rebalance-against-weights", what: "connections to endpoints of more weight are closed again and again",
		file: "balancer/algorithm.go", old: "return max(int(e.Weight), 1)", new: "return 1",
		pkg: "node", test: "TestShares",
	},
	{
		name: "hold-lets-everybody-in", what: "without endpoints, source ranges do not count",
		file: "policy/resolve.go", old: "case d.is(limited) && !t.admits", new: "case d.is(limited) && d.is(usable) && !t.admits",
		pkg: "policy", test: "TestHold",
	},
	{
		name: "strangers-name-clients", what: "anybody may name another client's address by a PROXY header",
		file: "service/proxyprotocol.go", old: "return r.Contains(peer)", new: "return true",
		pkg: "service", test: "TestTrusts",
	},
	{
		name: "header-counts-as-the-clients", what: "bytes_from_client counts the PROXY header",
		file: "relay/probe.go", old: "\tl.preface = uint16(len(p))\n", new: "",
		pkg: "test/e2e", test: "TestProxyProtocolIsSent/relay",
	},
	{
		name: "rank-ignored-in-the-table", what: "kernel flows begin round-robin at the first endpoint on all nodes",
		file: "flow/table.go", old: "= how, turn;", new: "= how, 0*turn;",
		pkg: "flow", test: "TestTableBeginsAtTheRank",
	},
	{
		name: "list-stays-in-the-table", what: "the table keeps a list of endpoints of which one was replaced",
		file: "flow/table.go", old: "step{sum, place})", new: "step{place: bpf.KernelPlace{Own: place.Own}})",
		pkg: "flow", test: "TestTableFollowsAReplacedEndpoint",
	},
	{
		name: "table-of-an-earlier-process-stays", what: "destinations stay in the table that an earlier process has left",
		file: "flow/server.go", old: "s.inherits, s.lastList = c.Magic != 0,", new: "s.inherits, s.lastList = false,",
		pkg: "flow", test: "TestTableOfAnEarlierProcess",
	},

	// Promise 2: the endpoint sees the client's address.
	{
		name: "nodes-address", what: "endpoints see the node's address in place of the client's",
		file: "upstream/upstream.go", old: "v.SourceFor(client, endpoint) == policy.SourceClient &&", new: "false &&",
		pkg: "test/e2e", test: "TestPromise2_EndpointSeesTheClientsAddressWhereItMust/sklookup-nftables/tcp",
	},
	{
		name: "clients-address", what: "endpoints see the client's address where the node's is required",
		file: "policy/resolve.go", old: "v.Source, v.SourceRule = SourceNode, RuleMasquerade\n\tswitch {\n\tcase !d.is(local):", new: "v.Source, v.SourceRule = SourceClient, RuleMasquerade\n\tswitch {\n\tcase !d.is(local):",
		pkg: "test/e2e", test: "TestPromise2_EndpointSeesTheClientsAddressWhereItMust/sklookup-nftables/udp",
	},

	// Promise 3: bytes arrive complete and in order, ends keep their kind.
	{
		name: "pipe-not-empty", what: "a pipe goes back to the pool with a byte of a stream in it",
		file: "relay/turn.go", old: "s.inPipe = int32(n)\n", new: "s.inPipe = int32(max(n-1, 1))\n",
		pkg: "test/e2e", test: "TestPromise3_BytesArriveCompleteAndInOrder/splice=auto",
	},
	{
		name: "limit-passed", what: "the number of pipes exceeds its limit for a moment",
		file: "relay/relay.go", old: "\t\tused := count.Load()\n", new: "\t\tif count.Add(n) <= limit {\n\t\t\treturn true\n\t\t}\n\t\tused := count.Add(-n)\n",
		pkg: "relay", test: "TestReserveKeepsTheLimit",
	},
	{
		name: "half-close-lost", what: "a FIN is not passed on while the other half goes on",
		file: "relay/direction.go", old: "w.kernel.shutdownWrite(int(other.fd))", new: "",
		pkg: "test/e2e", test: "TestPromise3_HalfCloseStaysAHalfClose/splice=auto",
	},
	{
		name: "held-bytes-lost", what: "what a slow reader does not take at once is thrown away",
		file: "relay/direction.go", old: "w.hold(s, p[n:])\n", new: "",
		pkg: "test/e2e", test: "TestPromise3_NothingIsLostBehindASlowReader/splice=off",
	},
	{
		name: "reset-becomes-fin", what: "a peer's reset is passed on as an end in order",
		file: "relay/link.go", old: "inOrder := end == ClientFin || end == EndpointFin", new: "inOrder := true",
		pkg: "test/e2e", test: "TestPromise3_ResetStaysAReset/splice=auto",
	},
	{
		name: "user-timeout", what: "a peer that pauses is taken for one that is gone (TCP_USER_TIMEOUT)",
		file: "stream/socket.go", old: "Count:    keepAliveProbes,", new: "Count: keepAliveProbes, UserTimeout: 2 * keepAlive,",
		pkg: "test/e2e", test: "TestPromise3_LivePeerMayPause/splice=auto",
	},
	{
		name: "kill-without-reset", what: "a killed proxy's streams end as if they were complete",
		file: "internal/sys/tcp.go", old: "unix.Linger{Onoff: 1, Linger: 0}", new: "unix.Linger{}",
		pkg: "test/e2e", test: "TestKillResetsConnections",
	},
	{
		name: "receive-buffers-free", what: "endpoints' sockets have the kernel's receive buffers, which grow to megabytes",
		file: "internal/sys/tcp.go", old: "\tfixReceiveBuffer(fd, ReceiveBuffer)\n\treturn fd, e\n", new: "\treturn fd, e\n",
		pkg: "test/e2e", test: "TestSlowReadersHoldLittleMemory",
	},
	{
		name: "window-scale-small", what: "a receive buffer that grows opens no window beyond 512 KiB",
		file: "internal/sys/tcp.go", old: "\t\te = connect(fd, remote)\n\t}\n\tif e != 0 && e != EINPROGRESS {\n\t\tClose(fd)\n\t\treturn -1, e\n\t}\n\tfixReceiveBuffer(fd, ReceiveBuffer)\n",
		new: "\t\tfixReceiveBuffer(fd, ReceiveBuffer)\n\t\te = connect(fd, remote)\n\t}\n\tif e != 0 && e != EINPROGRESS {\n\t\tClose(fd)\n\t\treturn -1, e\n\t}\n",
		pkg: "internal/sys", test: "TestGrownReceiveBufferOpensTheWindow",
	},
	{
		name: "window-scale-small-accepted", what: "a client sends no more than 512 KiB in a round trip",
		file: "internal/sys/tcp.go", old: "\tv6 := fam == unix.AF_INET6\n\twhat, e := setAll", new: "\tfixReceiveBuffer(fd, ReceiveBuffer)\n\tv6 := fam == unix.AF_INET6\n\twhat, e := setAll",
		pkg: "internal/sys", test: "TestGrownReceiveBufferOpensTheWindow",
	},
	{
		name: "answers-cut", what: "answers of more than 8 KiB lose their end",
		file: "datagram/forward.go", old: "p := w.downIn.Data(i)\n", new: "p := w.downIn.Data(i)\n\t\tp = p[:min(len(p), 8<<10)]\n",
		pkg: "test/e2e", test: "TestPromise3_DatagramsKeepTheirBoundariesAndSizes/sklookup-nftables",
	},
	{
		name: "datagrams-joined", what: "datagrams of a GSO batch reach the endpoint as one",
		file: "datagram/forward.go", old: "w.up.Append(netip.AddrPort{}, p, segment,", new: "w.up.Append(netip.AddrPort{}, p, 0,",
		pkg: "test/e2e", test: "TestTunnelsKeepTheirDatagrams",
	},

	{
		name: "reply-sockets-take-datagrams", what: "reply sockets are bound to the destination, where they share its datagrams with bound ports",
		file: "datagram/replysocket.go", old: "sys.BindUDP(netip.AddrPortFrom(aside(o.address.Addr()), o.address.Port()),\n\t\tsys.UDPOptions{Transparent: true, FreeBind: true, ReuseAddr: true, Deaf: true})",
		new: "sys.BindUDP(o.address, sys.UDPOptions{Transparent: true, FreeBind: true, ReusePort: true, Deaf: true})",
		pkg: "test/e2e", test: "TestAddressThatComesOntoTheNodeKeepsDatagrams/sklookup-nftables",
	},

	{
		name: "marks-alone", what: "the rule for replies matches the mark alone, so that others' checks find every source local",
		file: "redirect/route/rule.go", old: "k.table, k.protocol, k.first, k.last = table, int(redirect.ProtocolNumber(p)), ports[0], ports[1]", new: "k.table, _ = table, p",
		pkg: "test/e2e", test: "TestNeighboursThatUseMarks/sklookup-nftables",
	},

	{
		name: "sessions-from-a-lost-address", what: "UDP sessions go on from an address that the node has no more",
		file: "datagram/server.go", old: "if len(lost) > 0 {", new: "if len(lost) > 1000 {",
		pkg: "datagram", test: "TestSessionsFollowTheNodesAddress",
	},

	// Promise 4: a port with no endpoints refuses, one whose policy leaves none here drops.
	{
		name: "drops-without-endpoints", what: "clients of a port with no endpoints wait in place of being refused",
		file: "policy/resolve.go", old: "if !d.is(usable) && !d.is(holds) {\n\t\treturn Refuse", new: "if !d.is(usable) && !d.is(holds) {\n\t\treturn Drop",
		pkg: "test/e2e", test: "TestPromise4_PortWithNoEndpointsRefuses",
	},
	{
		name: "verdict-drops", what: "the same in the verdict, which explain shows",
		file: "policy/resolve.go", old: "deny(v, Refuse, RuleNoEndpoints)", new: "deny(v, Drop, RuleNoEndpoints)",
		pkg: "policy", test: "TestResolve",
	},
	{
		name: "refuses-without-local", what: "a port whose policy leaves no endpoint here refuses in place of dropping",
		file: "policy/resolve.go", old: "case d.kind == service.ClusterIP && d.is(local):\n\t\treturn Drop", new: "case d.kind == service.ClusterIP && d.is(local):\n\t\treturn Refuse",
		pkg: "test/e2e", test: "TestPromise4_PortWhosePolicyLeavesNoneHereDrops/sklookup-nftables",
	},

	// Promise 5: each connection leaves exactly one record.
	{
		name: "record-missing", what: "connections that the stop cuts leave no record",
		file: "conntrack/shard.go", old: "if s.table.wants(r) {\n\t\ts.push(r, Ended, 0, transport)", new: "if s.table.wants(r) && r.End != Shutdown {\n\t\ts.push(r, Ended, 0, transport)",
		pkg: "test/e2e", test: "TestPromise5_OneRecordForEachConnectionAlsoWhenStopped",
	},
	{
		name: "record-twice", what: "a connection that has no endpoint yet leaves two records",
		file: "conntrack/shard.go", old: "\ts.push(r, Ended, 0, transport)", new: "\tif !r.Connected {\n\t\t\ts.push(r, Ended, 0, transport)\n\t\t}\n\t\ts.push(r, Ended, 0, transport)",
		pkg: "test/e2e", test: "TestPromise5_OneRecordForEachConnectionAlsoWhenStopped",
	},

	// Promise 6: it owns what it makes in the kernel.
	{
		name: "repair-skipped", what: "what another program takes out of the kernel is not put back",
		file: "listener/manager.go", old: "return m.options.Redirector.Verify()", new: "return false, nil",
		pkg: "test/e2e", test: "TestPromise6_RemovedStateIsRepaired/sklookup-nftables",
	},
	{
		name: "cleanup-leaves-routes", what: "IPv6 routes stay when the proxy ends, and after cleanup",
		file: "redirect/route/remove.go", old: "list, err := r.ourRoutes(f, table)", new: "if f == service.IPv6 {\n\t\t\t\tcontinue\n\t\t\t}\n\t\t\tlist, err := r.ourRoutes(f, table)",
		pkg: "test/e2e", test: "TestPromise6_StopAndCleanupLeaveNothing/tproxy-nftables",
	},
	{
		name: "shortcut-past-rules", what: "forwarded packets skip the IP stack although rules of another program look at them there",
		file: "flow/bypass/others.go", old: "if passes(&c, isForwarding) {", new: "if false && passes(&c, isForwarding) {",
		pkg: "flow", test: "TestShortcuts",
	},
	{
		name: "shortcut-past-netfilter", what: "forwarded packets go past a BPF program of the type netfilter",
		file: "flow/bypass/netfilter.go", old: "l.Dead == 0 && ip {", new: "l.Dead == 0 && ip && false {",
		pkg: "flow", test: "TestShortcutsEndByANetfilterProgram",
	},
	{
		name: "shortcut-past-xdp", what: "forwarded packets go past an XDP program at a pod's own interface",
		file: "flow/bypass/peer.go", old: "case xdp.AttachMode == driver:", new: "case true:",
		pkg: "flow/bypass", test: "TestPeersWithXDP",
	},
	{
		name: "shortcut-past-programs", what: "forwarded packets go past a program of another one at the interface",
		file: "flow/bypass/others.go", old: "if !o.own[p.ID] {", new: "if false && !o.own[p.ID] {",
		pkg: "flow/bypass", test: "TestOthersAtInterfaces",
	},
	{
		name: "shortcut-overtakes", what: "once a second, datagrams of a stream overtake one that the kernel checks a neighbour with",
		file: "flow/bpf/shortcut.h", old: "(__s64)(now - last) >= PAUSE", new: "1",
		pkg: "flow/bpf", test: "TestModelOfShortcuts",
	},
	{
		name: "shortcut-with-a-trailer", what: "frames leave by a link that are longer than it allows, as nobody measures what follows their packet",
		file: "flow/bpf/shortcut.h", old: "whole = skb->len - link_header", new: "whole = p->end - link_header",
		pkg: "flow/bpf", test: "TestModelOfShortcuts",
	},
	{
		name: "shortcut-of-any-priority", what: "a VLAN does not tell urgent packets that were forwarded from others",
		file: "flow/bpf/shortcut.h", old: "0x4620 >> (p->tos >> 1 & 12) & 15", new: "skb->priority",
		pkg: "flow/bpf", test: "TestModelOfShortcuts",
	},
	{
		name: "shortcut-of-any-length", what: "datagrams that are longer than a route allows go on, and nobody tells the sender",
		file: "flow/bpf/shortcut.h", old: ".tot_len = longest(skb, p)", new: ".tot_len = 0",
		pkg: "flow", test: "TestShortcutsAreNoLongerThanTheWay",
	},
	{
		name: "shortcut-past-a-routes-mtu", what: "datagrams that are longer than a route allows, which has not locked its MTU, go on, and nobody tells the sender",
		file: "flow/bypass/routes.go", old: "least != 0 && least < a.MTU", new: "least < 0",
		pkg: "flow", test: "TestShortcutsKeepTheMTUOfRoutes",
	},
	{
		name: "shortcut-past-unknown-routes", what: "forwarded packets skip the IP stack although changes of the routes' MTUs were lost",
		file: "flow/bypass/routes.go", old: "!r.known || ", new: "",
		pkg: "flow/bypass", test: "TestRoutesAreListedAgain",
	},
	{
		name: "tables-in-one", what: "the first connection that needs a policy routing rule makes local addresses unreachable for a moment",
		file: "redirect/route/route.go", old: "if r.want == nil && !r.opts.SplitLate {", new: "if false {",
		pkg: "redirect/route", test: "TestTablesAreSplitBeforeServicesAreServed",
	},
	{
		name: "no-takeover", what: "the next proxy adds its rules behind those of a killed one",
		file: "redirect/tproxy/filter.go", old: "if old.exists {\n\t\tb.FlushTable", new: "if false {\n\t\tb.FlushTable",
		pkg: "test/e2e", test: "TestPromise6_KilledProxyIsTakenOver/tproxy-nftables",
	},
	{
		name: "program-not-pinned", what: "the BPF program ends with a killed proxy, so that the host's servers answer for Services",
		file: "redirect/sklookup/pin.go", old: "err := l.Pin(path); err != nil", new: "err := error(nil); err != nil",
		pkg: "test/e2e", test: "TestHostsServersDoNotAnswerForAKilledProxy/sklookup",
	},
	{
		name: "no-shield", what: "no rule refuses for a killed proxy, though the BPF program ends with it",
		file: "redirect/tproxy/omitted.go", old: "shield:   f.outlived,", new: "shield:   true,",
		pkg: "test/e2e", test: "TestHostsServersDoNotAnswerForAKilledProxy/sklookup-nftables",
	},
	{
		name: "external-not-shielded", what: "the host's servers answer for a killed proxy at addresses that are not the node's",
		file: "redirect/tproxy/rules.go", old: "target(set(take)), goTo(chainRefuse)", new: "target(set(take)), goTo(chainAside)",
		pkg: "test/e2e", test: "TestHostsServersDoNotAnswerForAKilledProxy/tproxy-nftables",
	},

	// Promise 7: a take-over refuses and cuts nothing.
	{
		name: "batch-not-acknowledged", what: "sockets count as given, whether or not they have arrived",
		file: "handover/conn.go", old: "if m.Taken != n {", new: "if m.Taken < 0 {",
		pkg: "handover", test: "TestEachBatchIsAcknowledged",
	},
	{
		name: "versions-ignored", what: "processes whose messages differ begin a take-over",
		file: "handover/message.go", old: "if h.Version < Least || h.Least > Version {", new: "if h.Version < 0 {",
		pkg: "test/e2e", test: "TestTakeOverByAnotherVersion",
	},
	{
		name: "strangers-served", what: "any process may take the sockets over",
		file: "handover/proof.go", old: "err == nil && forced {", new: "err == nil && (forced || !forced) {",
		pkg: "handover", test: "TestStrangersGetNothing",
	},
	{
		name: "proof-of-any-connection", what: "a proof counts on another connection than that it was made for",
		file: "handover/proof.go", old: "return err == nil && theirs == c.unix.RemoteAddr().String()", new: "return err == nil && theirs != \"\"",
		pkg: "handover", test: "TestProofOfAnotherConnection",
	},
	{
		name: "bound-sockets-stay", what: "node ports are not taken over",
		file: "stream/handover.go", old: "TakeOne(boundName(d))\n\tif !ok {", new: "TakeOne(boundName(d))\n\tif ok || !ok {",
		pkg: "test/e2e", test: "TestPromise7_TakeOverRefusesAndCutsNothing/relay",
	},
	{
		name: "upcalls-read-by-both", what: "the old process goes on reading what the kernel asks after a take-over",
		file: "flow/worker.go", old: "w.loop.Remove(w.asked) // what comes is the next process's", new: "",
		pkg: "flow", test: "TestHandOverLeavesTheNextProcessItsUpcalls",
	},
	{
		name: "moved-not-acknowledged", what: "connections count as given, whether or not their descriptors have arrived",
		file: "handover/move.go", old: "m.Taken != len(fds)", new: "m.Taken < 0",
		pkg: "handover", test: "TestMoveWithoutAcknowledgement",
	},
	{
		name: "reply-port-once", what: "a connection waits if the first reply port that it tries is another process's",
		file: "upstream/tcp.go", old: "for range min(tries, ports.count()) {", new: "for range 1 {",
		pkg: "test/e2e", test: "TestTakeOverSharesReplyPorts/bind",
	},
	{
		name: "other-numbers", what: "connections hang once a process with other reply ports has taken over",
		file: "node/handover.go", old: "h.Numbers != own {", new: "h.Numbers == \"\" {",
		pkg: "test/e2e", test: "TestTakeOverWithOtherNumbers",
	},
	{
		name: "second-gives-up", what: "of two processes that begin at once, one ends with an error",
		file: "node/takeover.go", old: "isRefused || time.Since(began) > stopPatience", new: "isRefused || time.Since(began) > 0",
		pkg: "test/e2e", test: "TestTwoTakeOversAtOnce",
	},
	{
		name: "next-dies-late", what: "a process leaves though the next one has died just before",
		file: "node/handover.go", old: "		if gone(c) {\n			err = errNextGone\n		}\n", new: "",
		pkg: "test/e2e", test: "TestTakeOverGivenUp",
	},
	{
		name: "held-byte-dropped", what: "a byte that waits for a slow reader is lost when its connection moves",
		file: "relay/handover.go", old: "bytes := s.held.bytes()\n", new: "bytes := s.held.bytes()[1:]\n",
		pkg: "relay", test: "TestLinkAgainstModel",
	},
	{
		name: "left-in-old-epoll", what: "the old process's epoll goes on to watch a socket that has moved",
		file: "relay/handover.go", old: "w.loop.Remove(s.reg)", new: "w.loop.Forget(s.reg)",
		pkg: "relay", test: "TestLinkAgainstModel",
	},
	{
		name: "held-message-dropped", what: "a message that waits for a slow reader is lost when its association moves",
		file: "message/handover.go", old: "held: from.held, info: from.Info", new: "info: from.Info",
		pkg: "message", test: "TestLinkAgainstModel",
	},
	{
		name: "association-in-old-epoll", what: "the old process's epoll goes on to watch an association that has moved",
		file: "message/handover.go", old: "\t\t\tw.loop.Remove(s.reg)\n", new: "",
		pkg: "message", test: "TestLinkAgainstModel",
	},
	{
		name: "record-written-twice", what: "the process that gives a connection away writes a record of it, too",
		file: "stream/move.go", old: "w.shard.Leave(&c.record)", new: "w.shard.Close(&c.record)",
		pkg: "test/e2e", test: "TestPromise7_ConnectionsMove",
	},
	{
		name: "arrivals-fill-limits", what: "connections that arrive from another process leave no room for new ones",
		file: "stream/move.go", old: "if !s.hasRoom(a.pool) {", new: "if false && !s.hasRoom(a.pool) {",
		pkg: "test/e2e", test: "TestTakeOverAtTheLimitOfOpenFiles",
	},
	{
		name: "session-recorded-twice", what: "the process that gives a UDP session away writes a record of it, too",
		file: "datagram/move.go", old: "w.shard.Leave(&c.record)", new: "w.shard.Close(&c.record)",
		pkg: "datagram", test: "TestSessionsMove",
	},
	{
		name: "copies-stay", what: "datagrams that a dead endpoint has got are lost if their session has moved",
		file: "datagram/move.go", old: "range c.unacked.count()", new: "range 0 * c.unacked.count()",
		pkg: "datagram", test: "TestCopiesMove",
	},
	{
		name: "nothing-moves", what: "what is open stays with the process before",
		file: "node/handover.go", old: "p.moves = m.Hello.Moves", new: "p.moves = false",
		pkg: "test/e2e", test: "TestPromise7_TakeOversUnderLoad/relay/sklookup-nftables",
	},
	{
		name: "datagrams-before-sessions", what: "the next process receives datagrams before it has their sessions",
		file: "node/takeover.go", old: "	p.stream.Begin()\n", new: "	p.stream.Begin()\n	p.datagram.Begin()\n",
		pkg: "test/e2e", test: "TestPromise7_SessionsMove/many",
	},
	// Promise 8: one service does not slow another.
	{
		name: "accept-sleeps", what: "each connection holds its event loop for 60 ms",
		file: "stream/accept.go", old: "w.backoff = 0\n", new: "w.backoff = 0\n\t\ttime.Sleep(60 * time.Millisecond)\n",
		pkg: "test/e2e", test: "TestPromise8_FloodOfOneServiceSlowsNoOther",
	},
	{
		name: "session-sleeps", what: "the first datagrams of each UDP session hold its event loop for 25 ms each",
		file: "datagram/unacked.go", old: "\tk := s.unacked\n\tused := 0\n", new: "\ttime.Sleep(25 * time.Millisecond)\n\tk := s.unacked\n\tused := 0\n",
		pkg: "test/e2e", test: "TestPromise8_FloodOfDatagramsSlowsNoOther",
	},
	{
		name: "attempt-sleeps", what: "each attempt that fails holds its event loop for 40 ms",
		file: "stream/conn.go", old: "c.record.AttemptFailed(reason, poll.Nanotime())\n", new: "c.record.AttemptFailed(reason, poll.Nanotime())\n\ttime.Sleep(40 * time.Millisecond)\n",
		pkg: "test/e2e", test: "TestPromise8_RefusingServiceSlowsNoOther",
	},
	{
		name: "suspicion-too-short", what: "endpoints that refused are tried again after 5 ms",
		file: "balancer/suspects.go", old: "firstSuspicion   = 500 * time.Millisecond", new: "firstSuspicion   = 5 * time.Millisecond",
		pkg: "test/e2e", test: "TestPromise8_RefusingServiceSlowsNoOther",
	},
	{
		name: "retries-unbounded", what: "one round of the loop makes any number of attempts for one Service",
		file: "stream/retries.go", old: "if r.left == 0 {", new: "if false {",
		pkg: "stream", test: "TestRetriesTakeTurns",
	},
	{
		name: "dialing-blocks-all", what: "connections that wait for an endpoint stop accepting for every Service",
		file: "stream/stalled.go", old: "w.loop.Remove(a.reg)\n\tw.stalled", new: "for _, a := range w.acceptors {\n\t\tw.loop.Remove(a.reg)\n\t}\n\tw.stalled",
		pkg: "test/e2e", test: "TestPromise8_DeadServiceSlowsNoOther",
	},
	{
		name: "namespace-unlimited", what: "a namespace may have more connections than its limit",
		file: "stream/quota.go", old: "!p.namespace.enter(most)", new: "!p.namespace.enter(1000 * most)",
		pkg: "test/e2e", test: "TestConnectionLimitOfANamespace",
	},

	// Beside the promises.
	{
		name: "session-not-moved", what: "a UDP session goes on to an endpoint that is gone",
		file: "datagram/service.go", old: "_, gone := c.endpoints[r.Endpoint.Addr]\n\treturn gone", new: "_, gone := c.endpoints[r.Endpoint.Addr]\n\treturn gone && c.all",
		pkg: "test/e2e", test: "TestSessionsFollowTheirEndpoints",
	},
	{
		name: "stranger-believed", what: "an ICMP error that a stranger sends ends a UDP session",
		file: "datagram/session.go", old: "q.Errno != sys.ECONNREFUSED || q.Offender != c.record.Endpoint.Addr.Addr()", new: "q.Errno != sys.ECONNREFUSED",
		pkg: "datagram", test: "TestForgedErrorsMoveNoSession",
	},
	{
		name: "udp-lost-behind-errors", what: "a datagram is lost behind many forged errors",
		file: "datagram/forward.go", old: "mostTries = 2 * socketBuffer / 768 / errorShare", new: "mostTries = 3",
		pkg: "datagram", test: "TestForgedErrorsMoveNoSession",
	},
	{
		name: "udp-lost-at-a-bare-error", what: "an error without a message costs a datagram",
		file: "datagram/forward.go", old: "first := !r.bare", new: "first := false",
		pkg: "datagram", test: "TestErrorWithoutAMessage",
	},
	{
		name: "udp-bare-error-stays", what: "an error without a message keeps the loop busy",
		file: "datagram/socket.go", old: "sys.SocketError(int(u.fd))", new: "_ = u.fd",
		pkg: "datagram", test: "TestErrorWithoutAMessage",
	},
	{
		name: "younger-claim-wins", what: "a new Service takes an external IP that another one serves",
		file: "service/claims.go", old: "cmp.Compare(a.rank, b.rank),\n\t\tcmp.Compare(a.since, b.since)", new: "cmp.Compare(a.rank, b.rank),\n\t\tcmp.Compare(b.since, a.since)",
		pkg: "service", test: "TestEarlierClaimStays",
	},
	{
		name: "source-ranges-ignored", what: "clients outside loadBalancerSourceRanges are served",
		file: "policy/resolve.go", old: "d.is(limited) && !t.admits(", new: "d.is(limited) && v.Kind < 0 && !t.admits(",
		pkg: "policy", test: "TestAdmission",
	},
	{
		name: "control-characters", what: "a tenant's text moves the cursor of whoever reads the log",
		file: "internal/printable/printable.go", old: "if s[i] < ' ' || s[i] > '~' {", new: "if s[i] > '~' {",
		pkg: "cmd/sluice", test: "FuzzNoControlCharacterLeaves",
	},
	{
		name: "broken-file-empties", what: "a manifest with a typo takes its Services out of force",
		file: "source/manifests/load.go", old: "if !st.bad {", new: "if true {",
		pkg: "test/e2e", test: "TestLastGoodContentStaysInForce",
	},

	// The API server and the configuration file.
	{
		name: "slices-piled-up", what: "a start keeps all slices as API objects until the last one has come",
		file: "source/kubernetes/box.go", old: "return p, nil\n", new: "_ = p\n\t\t\treturn object, nil\n",
		pkg: "source/kubernetes", test: "TestSlicesAreParsedWhenTheyAreDecoded",
	},
	{
		name: "token-dropped", what: "--master is asked without the token of the pod",
		file: "source/kubernetes/client.go", old: "config.Host = c.Master\n", new: "config.Host, config.BearerToken = c.Master, \"\"\n",
		pkg: "source/kubernetes", test: "TestMasterGetsTheTokenOfThePod",
	},
	{
		name: "token-in-plain", what: "the pod's token is sent to a server without TLS",
		file: "source/kubernetes/client.go", old: "if !rest.IsConfigTransportTLS(*config) {", new: "if false {",
		pkg: "source/kubernetes", test: "TestMasterGetsTheTokenOfThePod",
	},
	{
		name: "restart-not-told", what: "a field of the configuration file that needs a restart is called applied",
		file: "cmd/sluice/configfile.go", old: "\"clusterCIDR\", \"nodePortAddresses\",", new: "\"clusterCIDR\", \"healthzBindAddress\", \"nodePortAddresses\",",
		pkg: "cmd/sluice", test: "TestChangesOfTheConfigurationFile",
	},
	// All nodes of a cluster.
	{
		name: "silent-node-unnamed", what: "kubectl sluice passes over a node that does not answer",
		file: "cmd/sluice/kubectl.go", old: "\t\t\ttold(unanswered{pod.Node, err})\n", new: "",
		pkg: "cmd/sluice", test: "TestAllNodes",
	},
	{
		name: "nodes-all-at-once", what: "kubectl sluice asks more nodes at the same time than --parallel",
		file: "cmd/sluice/kubectl.go", old: "make(chan struct{}, o.parallel)", new: "make(chan struct{}, 1000)",
		pkg: "cmd/sluice", test: "TestParallel",
	},
	{
		name: "exec-left", what: "a command is left in the pod when kubectl sluice has its answer",
		file: "cmd/sluice/kubectl.go", old: "\tdefer c.Close()\n", new: "",
		pkg: "cmd/sluice", test: "TestAllNodes",
	},
	{
		name: "two-pods-of-a-node", what: "kubectl sluice asks the pod that is not ready yet in a rolling update",
		file: "cmd/sluice/internal/pods/pods.go", old: "cmp.Compare(first(a.ready), first(b.ready))", new: "0",
		pkg: "cmd/sluice/internal/pods", test: "TestChoose",
	},
	{
		name: "nodes-unsorted", what: "kubectl sluice lists some rows of each node, and not the first of all",
		file: "cmd/sluice/internal/merge/merge.go", old: "slices.SortStableFunc(l.Rows, func(a, b Row) int { return l.Compare(&a, &b) })", new: "",
		pkg: "cmd/sluice/internal/merge", test: "TestList",
	},
	// The admin socket.
	{
		name: "drain-forgotten", what: "new connections still go to a drained endpoint",
		file: "policy/topology.go", old: "endpoints := n.withDrains(v.Endpoints)", new: "endpoints := v.Endpoints",
		pkg: "policy", test: "TestDrained",
	},
	{
		name: "take-over-undrains", what: "what the running sluice is told to drain while the next one begins is lost",
		file: "node/takeover.go", old: "p.loadDrains() //", new: "//",
		pkg: "node", test: "TestDrainDuringATakeOver",
	},
	{
		name: "restart-undrains", what: "a restart sends new connections to what an operator has drained",
		file: "node/drains.go", old: "p.policy.Drained = set", new: "_ = set",
		pkg: "test/e2e", test: "TestDrainSurvivesARestart",
	},
}
