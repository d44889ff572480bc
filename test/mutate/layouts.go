package main

// layouts are mistakes in what follows a process of another version, or of the same one.
var layouts = []mutation{
	{
		name: "flow-others-left", what: "UDP sessions get another endpoint when a process with other maps takes over",
		file: "flow/server.go", old: "left = s.takeOthers()", new: "left = 1",
		pkg: "flow", test: "TestSessionsOfAnotherVersionGoOn",
	},
	{
		name: "flow-others-datagrams-alone", what: "connections in maps of another layout stay there, and leave no records",
		file: "flow/bpf/others.go", old: "(l.was.isSession() || f.knows(l.read))", new: "l.was.isSession()",
		pkg: "flow", test: "TestFlowsInMapsOfAnotherLayoutGoOn",
	},
	{
		name: "flow-others-direct", what: "a client's own connection to an endpoint stays in maps of another version, and gets packets of the flow by its port",
		file: "flow/bpf/others.go", old: " | KernelOptionOPTION_DIRECT\n", new: "\n",
		pkg: "flow", test: "TestDirectConnectionsGoOnBesideAnotherVersion",
	},
	{
		name: "flow-others-node", what: "a connection of the node's own moves to another version by tuples that it does not have",
		file: "flow/bpf/index.go", old: "	case k.isOnNode():\n", new: "	case k == nil:\n",
		pkg: "flow", test: "TestDirectConnectionsGoOnBesideAnotherVersion",
	},
	{
		name: "flow-others-translated", what: "programs translate once more what those of another version have translated",
		file: "flow/bpf/direct.h", old: "	if (!(f->options & OPTION_DIRECT))\n", new: "	if (1)\n",
		pkg: "flow", test: "TestDirectConnectionsGoOnBesideAnotherVersion",
	},
	{
		name: "flow-others-lingering", what: "a connection that is over stays in maps of another version, whose programs translate packets of its client's next one",
		file: "flow/bpf/others.go", old: "		known[i] = true\n", new: "		if known[i] = true; l.was.Seen&KernelSeenRECORDED != 0 {\n			continue\n		}\n",
		pkg: "flow/bpf", test: "TestTakenFlowsAreVoidThere",
	},
	{
		name: "flow-others-closed-tuple", what: "a connection that is over takes the packets of its client's next one, which is relayed, when another version takes over",
		file: "flow/adopt.go", old: "	if own.State < bpf.KernelStateCLOSED {", new: "	if true {",
		pkg: "flow", test: "TestClosedFlowLeavesItsTupleToTheNode",
	},
	{
		name: "flow-closed-tuple", what: "a connection that is over keeps its tuple when its client uses that towards a destination without a Service",
		file: "flow/bpf/flow.bpf.c", old: "		leave_to_relay(p, before);\n		return begin_direct", new: "		return begin_direct",
		pkg: "flow", test: "TestClosedFlowLeavesItsTupleToTheNode",
	},
	{
		name: "flow-stack", what: "kernels before 6.8 refuse the programs, which have more stack than these allow",
		file: "flow/bpf/flow.bpf.c", old: "static __noinline int rewrite_apart(", new: "static __always_inline int rewrite_apart(",
		pkg: "flow/bpf", test: "TestStackFitsOlderKernels",
	},
	{
		name: "flow-others-begun", what: "handshakes in maps of another layout stay there: their clients' next SYNs begin others",
		file: "flow/bpf/others.go", old: " || k.State == KernelStateASKING\n", new: " || k.State == KernelStateASKING && k.Protocol == syscall.IPPROTO_UDP\n",
		pkg: "flow", test: "TestHandshakesGoOnInTheNextProcess",
	},
	{
		name: "flow-others-ends", what: "programs of another version do not see the ends of the connections that they keep",
		file: "flow/bpf/flow.bpf.c", old: "			skb->tc_index = passage;\n", new: "			;\n",
		pkg: "flow", test: "TestEndsAreSeenBehindAnotherVersion",
	},
	{
		name: "flow-others-stay", what: "programs of another version stay when nothing needs them",
		file: "flow/server.go", old: "if left == 0 || s.takeOthers() == 0 {", new: "if left < 0 {",
		pkg: "flow", test: "TestFlowsInMapsOfAnotherLayoutGoOn",
	},
	{
		name: "flow-others-first", what: "programs stay behind those of a version that came later",
		file: "flow/server.go", old: "s.pins.LinkPath, s.pins.HasOthers()", new: "s.pins.LinkPath, false",
		pkg: "flow", test: "TestSessionsOfAnotherVersionGoOn",
	},
	{
		name: "flow-others-misread", what: "what another version's maps hold is read as if its names meant the same",
		file: "flow/bpf/others.go", old: "!is || disputed(own.Values, other.Values, isOfSessions) != 0", new: "!is",
		pkg: "flow/bpf", test: "TestFlowsOfAnotherVersion",
	},
	{
		name: "flow-others-marks", what: "connections whose marks mean something else to another version are read as if they did not",
		file: "flow/bpf/others.go", old: "&d.marks != 0", new: "&d.marks == ^uint32(0)",
		pkg: "flow/bpf", test: "TestConnectionsOfAnEarlierBuild",
	},
	{
		name: "flow-others-in-both", what: "a flow that another version has taken over is in the first one's maps, too",
		file: "flow/bpf/others.go", old: "		l.void(f)\n", new: "		l.merge(f)\n",
		pkg: "flow/bpf", test: "TestTakenFlowsAreVoidThere",
	},
	{
		name: "flow-others-in-none", what: "neither version knows a flow that moves for a program that looks for it in both",
		file: "flow/bpf/others.go", old: "		l.merge(f)\n		leaving =", new: "		l.void(f)\n		leaving =",
		pkg: "flow/bpf", test: "TestTakenFlowsAreVoidThere",
	},
	{
		name: "flow-others-unmerged", what: "what another version's programs see of a flow that moves is lost",
		file: "flow/bpf/others.go", old: "	l.own.merge(&l.was, &now)\n", new: "",
		pkg: "flow/bpf", test: "TestTakenFlowsAreVoidThere",
	},
	{
		name: "flow-others-first-end", what: "the record of a connection that ends while it moves names the end that came second",
		file: "flow/bpf/others.go", old: "if was.FirstEnd == 0 && now.FirstEnd != 0 {", new: "if k.FirstEnd == 0 {",
		pkg: "flow/bpf", test: "TestWhatBothVersionsSeeOfAFlow",
	},
	{
		name: "flow-others-bytes", what: "bytes of a connection that moves count twice",
		file: "flow/bpf/others.go", old: "own.reach(was, now)", new: "atomic.AddUint64(&own.Bytes, now.Bytes-was.Bytes)",
		pkg: "flow/bpf", test: "TestWhatBothVersionsSeeOfAFlow",
	},
	{
		name: "flow-others-answer", what: "a connection that its endpoint answers while it moves has as many bytes as the endpoint's first number lacks to 2^32",
		file: "flow/bpf/others.go", old: "	for was.End != now.End {\n", new: "	for {\n",
		pkg: "flow/bpf", test: "TestWhatBothVersionsSeeOfAFlow",
	},
	{
		name: "flow-others-over", what: "another version's programs send what is relayed to the endpoint of a connection that is over, until all flows have moved",
		file: "flow/bpf/others.go", old: "(*KernelFlow).IsOver, ", new: "",
		pkg: "flow/bpf", test: "TestTakenFlowsAreVoidThere",
	},
	{
		name: "flow-others-stale", what: "a connection that is over takes the packets of another version's next one by the same port",
		file: "flow/adopt.go", old: "behind && k.IsOver()", new: "behind && k.IsOver() && false",
		pkg: "flow", test: "TestClosedFlowLeavesItsTupleToAnotherVersion",
	},
	{
		name: "flow-others-halfway", what: "programs behind another version take a hidden client's connection for one to the endpoint itself",
		file: "flow/bpf/flow.bpf.c", old: "	if (p->fragment || is_translated(skb) || (", new: "	if (p->fragment || (is_translated(skb) && skb->tc_index != HALFWAY) || (",
		pkg: "flow", test: "TestClosedFlowLeavesItsTupleToAnotherVersion",
	},
	{
		name: "flow-others-room", what: "flows that another version has taken over count for limits after a return to the first one",
		file: "flow/adopt.go", old: "		w.countAgain()\n", new: "",
		pkg: "flow", test: "TestEndsAreSeenBehindAnotherVersion",
	},
	{
		name: "flow-others-older", what: "an old connection gets the packets of a newer one of another version",
		file: "flow/adopt.go", old: "	w.giveWayTo(index)\n", new: "",
		pkg: "flow", test: "TestOlderFlowGivesWay",
	},
	{
		name: "flow-programs-anew", what: "the kernel verifies the programs at each start, though the same build has pinned them",
		file: "flow/bpf/programs.go", old: "if to.Ingress != nil && to.Egress != nil && !p.HasOthers() {", new: "if false {",
		pkg: "flow/bpf", test: "TestProgramsOfTheSameBuildAreTakenOver",
	},
	{
		name: "flow-tunnel-bare", what: "an interface without a link header that comes later has no programs",
		file: "flow/attach/interfaces.go", old: "\t\treturn bare\n", new: "\t\treturn unknown\n",
		pkg: "flow/attach", test: "TestTunnelGetsItsPrograms",
	},
	{
		name: "flow-tunnels-first", what: "each start loads the programs for tunnels",
		file: "flow/bpf/kernel.go", old: "\treturn k, nil\n}\n\n// specFor", new: "\t_, err = k.Bare()\n\treturn k, err\n}\n\n// specFor",
		pkg: "flow/bpf", test: "TestProgramsForTunnelsAreLoadedLater",
	},
	{
		name: "flow-time-of-adoption", what: "a record's time is when a process has adopted the connection",
		file: "flow/begun.go", old: "\t\tWall:     f.worker.unixTime(started),\n", new: "",
		pkg: "flow", test: "TestAdoptedConnectionKeepsItsTime",
	},
}
