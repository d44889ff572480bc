package main

// names are mistakes about names of Services, developers' manifests, and messages.
var names = []mutation{
	{
		name: "help-differs", what: "--help says something else than the documentation",
		file: "cmd/sluice/run.go", old: "limit of pipes for splicing; above it bytes are copied", new: "most pipes for splicing",
		pkg: "test/e2e", test: "TestConfigurationIsDocumented",
	},
	{
		name: "unready-answered", what: "the name of a headless Service leads to endpoints that are not ready",
		file: "dns/catalog.go", old: "h := e.hosts[a]; h.Ready", new: "h := e.hosts[a]; true",
		pkg: "dns", test: "TestSpecification",
	},
	{
		name: "ports-unanswered", what: "the name of a Service has no SRV records for its ports",
		file: "dns/answer.go", old: "r.behind(e, base, e.ports)", new: "r.behind(e, base, nil)",
		pkg: "dns", test: "TestSpecification",
	},
	{
		name: "place-ignored", what: "a headless Service is answered by the server's place, not by the client's",
		file: "dns/answer.go", old: "place: v.places.of(client)", new: "place: v.places.own",
		pkg: "dns", test: "TestTopology",
	},
	{
		name: "answer-untruncated", what: "answers over UDP have as many bytes as over TCP",
		file: "dns/server.go", old: "size := q.size", new: "size := tcpSize",
		pkg: "dns", test: "TestTruncation",
	},
	{
		name: "failure-believed", what: "a resolver that cannot answer keeps the others from being asked",
		file: "dns/forward.go", old: "if last = reply; !unable(", new: "if last = reply; true || !unable(",
		pkg: "dns", test: "TestForward",
	},
	{
		name: "tenants-loopback", what: "in a cluster, a tenant's slice leads to the node's own servers",
		file: "service/slice.go", old: "s.asked = o.OwnEndpoints &&", new: "s.asked =",
		pkg: "source/manifests", test: "TestAskedEndpoints",
	},
	{
		name: "address-twice", what: "two Services are given one cluster IP",
		file: "source/manifests/allocate.go", old: "if a.taken[addr] == 0 {", new: "if true {",
		pkg: "source/manifests", test: "TestAllocationAvoidsOthers",
	},
	{
		name: "selector-unread", what: "sluice check passes over a selector that no pod has",
		file: "source/manifests/workload.go", old: "!ok || has != value {\n\t\t\treturn false", new: "!ok || has != value {\n\t\t\treturn true",
		pkg: "source/manifests", test: "TestInspect",
	},
	{
		name: "past-unbounded", what: "records of the past take more memory than --past",
		file: "conntrack/past.go", old: "p.held > p.room-mostBlock", new: "p.held > 2*p.room",
		pkg: "conntrack", test: "TestPastIsBounded",
	},
	{
		name: "past-first", what: "a bounded question about the past is answered with the first records, not the last",
		file: "conntrack/past.go", old: "if skip > 0 {", new: "if false {",
		pkg: "conntrack", test: "TestPastQuestions",
	},
	{
		name: "hosts-file-left", what: "sluice dev leaves its names in the hosts file",
		file: "cmd/sluice/internal/dev/hostsfile.go", old: "return h.replace(\"\")", new: "return nil",
		pkg: "cmd/sluice/internal/dev", test: "TestHostsFile",
	},
}
