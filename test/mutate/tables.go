package main

// tables are mistakes in entering many Services into the table of kernel flows at once, in choosing
// ports that are free at an endpoint, and in the hops that are known.
var tables = []mutation{
	{
		name: "flow-lists-twice", what: "two goroutines give lists of endpoints of two Services one number",
		file: "flow/table.go", old: "atomic.AddUint32(&s.kernel.Control.LastList, 1)", new: "atomic.AddUint32(&s.kernel.Control.LastList, 1)/2 + 1",
		pkg: "flow", test: "TestTableOfManyServices",
	},
	{
		name: "flow-shares-left", what: "the last Services of a change are not entered into the table",
		file: "flow/table.go", old: "i < min(end, len(all))", new: "i < min(end, len(all)/share*share)",
		pkg: "flow", test: "TestTableOfManyServices",
	},
	{
		name: "flow-batch-believed", what: "destinations that found no room in the table count as the table's",
		file: "flow/table.go", old: "for i := 0; err != nil && i < len(keys); i++ {", new: "for i := 0; err == nil && i < len(keys); i++ {",
		pkg: "flow", test: "TestManyServicesWithoutRoom",
	},
	{
		name: "flow-occupied-table", what: "the table has each flow meet the client's own connection to the endpoint",
		file: "flow/bpf/table.h", old: "return is_occupied(&back);", new: "return 0;",
		pkg: "flow", test: "TestFlowsAvoidAClientsOwnConnection",
	},
	{
		name: "flow-occupied", what: "each flow that userspace decides about meets the client's own connection to the endpoint",
		file: "flow/bpf/inject.h", old: "if ((!(f->options & OPTION_MASQUERADE) && is_occupied(&t)) || claim", new: "if (claim",
		pkg: "flow", test: "TestFlowsAvoidAClientsOwnConnection",
	},
	{
		name: "flow-occupied-hidden", what: "each flow of a hidden client meets the connection in TIME-WAIT at the endpoint",
		file: "flow/bpf/inject.h", old: "if (is_occupied(&t) || ", new: "if (",
		pkg: "flow", test: "TestHiddenClientsAvoidTimeWait",
	},
	{
		name: "flow-few-ports-tried", what: "the table gives up after eight ports that a hidden client cannot have",
		file: "flow/bpf/table.h", old: "#define HIDE_TRIES 32", new: "#define HIDE_TRIES 8",
		pkg: "flow", test: "TestTableFindsOneOfFewPorts",
	},
	{
		name: "flow-hop-of-another", what: "packets of a flow go to the next host of another flow that has passed just before",
		file: "flow/bpf/shortcut.h", old: "k->reference == found && ", new: "",
		pkg: "flow", test: "TestFlowsHaveTheirOwnHops",
	},
	{
		name: "flow-hop-for-long-packets", what: "a packet that is longer than its way allows goes where a short one went before",
		file: "flow/bpf/shortcut.h", old: " && k->mtu >= longest(skb, p)", new: "",
		pkg: "flow/bpf", test: "TestKnownHopsServeLikePackets",
	},
	{
		name: "flow-hops-stay-known", what: "BPF does not hear that its known hops are by ways that have changed",
		file: "flow/shortcut.go", old: "	atomic.AddUint32(&s.kernel.Control.WaysNumber, 1)\n	defer atomic.AddUint32(&s.kernel.Control.WaysNumber, 1)\n", new: "",
		pkg: "flow", test: "TestShortcutsHeedRoutesAtOnce",
	},
	{
		name: "flow-hop-of-an-attempt", what: "packets go to the next host of an endpoint that was given up",
		file: "flow/bpf/shortcut.h", old: "k->attempts == f->attempts && ", new: "",
		pkg: "flow/bpf", test: "TestKnownHopsServeLikePackets",
	},
	{
		name: "flow-hop-by-old-ways", what: "packets take a shortcut for a while after userspace has closed the way",
		file: "flow/bpf/shortcut.h", old: "k->ways_number == c->ways_number", new: "1",
		pkg: "flow/bpf", test: "TestKnownHopsServeLikePackets",
	},
}
