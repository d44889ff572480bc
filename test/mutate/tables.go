package main

// tables are mistakes in entering many Services into the table of kernel flows at once, and in choosing
// ports that are free at an endpoint.
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
}
