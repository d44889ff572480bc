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
		file: "flow/bpf/others.go", old: "(isSession || form.connections)", new: "isSession",
		pkg: "flow", test: "TestFlowsInMapsOfAnotherLayoutGoOn",
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
		file: "flow/bpf/others.go", old: "!is || !agree(own.Values, other.Values, isOfSessions)", new: "!is || len(other.Values) == 0",
		pkg: "flow/bpf", test: "TestFlowsOfAnotherVersion",
	},
	{
		name: "flow-programs-anew", what: "the kernel verifies the programs at each start, though the same build has pinned them",
		file: "flow/bpf/programs.go", old: "if to.Ingress != nil && to.Egress != nil && !p.HasOthers() {", new: "if false {",
		pkg: "flow/bpf", test: "TestProgramsOfTheSameBuildAreTakenOver",
	},
}
