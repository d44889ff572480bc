package main

import "slices"

// faults are mistakes that the product once had and that attacks found. Each mutation
// takes a mend back.
var faults = []mutation{
	// In the data path.
	{
		name: "open-unknown", what: "open connections are new ones to the first rule by states",
		file: "flow/tracked.go", old: "if len(open) == 0 {", new: "if true {",
		pkg: "flow", test: "TestRulesWithStatesKeepOpenConnections",
	},
	{
		name: "self-connection", what: "a socket to an endpoint on this node that is down connects to itself",
		file: "upstream/upstream.go", old: "case ownEndpoint && r.kernel.has(ep.Addr.Port()):", new: "case false:",
		pkg: "stream", test: "TestEndpointOnThisNodeIsNeverTheProxyItself",
	},
	{
		name: "self-session", what: "a UDP socket to an endpoint on this node that is down sends to itself",
		file: "upstream/upstream.go", old: "case ownEndpoint && r.kernel.has(ep.Addr.Port()):", new: "case false:",
		pkg: "datagram", test: "TestEndpointOnThisNodeIsNeverTheSessionsOwnSocket",
	},
	{
		name: "privileged-client", what: "servers that admit only privileged ports refuse the node's connections and masqueraded ones",
		file: "upstream/privileged.go", old: "return client.Port() != 0 && client.Port() < firstUnprivileged", new: "return false",
		pkg: "test/e2e", test: "TestPrivilegedClientsGetPrivilegedPorts/bind",
	},
	{
		name: "privileged-untracked", what: "replies to a privileged port are invalid to connection tracking",
		file: "upstream/privileged.go", old: "\t\to.Mark = 0\n", new: "\t\to.Transparent = true\n",
		pkg: "test/e2e", test: "TestPrivilegedClientsGetPrivilegedPorts/tproxy-nftables",
	},
	{
		name: "urgent-end", what: "splice's stop at urgent data is taken for the end of the stream",
		file: "relay/turn.go", old: "s.state |= urgent\n\t\treturn true", new: "s.state |= urgent\n\t\tl.end(i)\n\t\treturn false",
		pkg: "relay", test: "TestUrgentByteBeforeTheEnd",
	},
	{
		name: "urgent-fin", what: "the FIN is passed on with urgent data unread",
		file: "relay/direction.go", old: "e != 0 || n > 0 {\n\t\t\ts.state |= urgent", new: "e != 0 || n > 1<<30 {\n\t\t\ts.state |= urgent",
		pkg: "relay", test: "TestUrgentByteThatNoEventTellsOf",
	},
	{
		name: "special-addresses", what: "an external IP may be a broadcast address",
		file: "service/port.go", old: "case s.hosts.broadcast.Has(a):", new: "case false && s.hosts.broadcast.Has(a):",
		pkg: "service", test: "TestBroadcastAddressesAreNotServed",
	},
	{
		name: "service-unlimited", what: "a Service may have more connections than its limit",
		file: "stream/quota.go", old: "!p.service.enter(most)", new: "!p.service.enter(1000 * most)",
		pkg: "stream", test: "TestServiceLimitCountsAllPorts",
	},
	{
		name: "dialing-unlimited", what: "--max-dialing-per-service bounds nothing",
		file: "stream/quota.go", old: "q.dialing.Add(1) <= most", new: "q.dialing.Add(1) <= 1000*most",
		pkg: "stream", test: "TestDialingLimitIsExact",
	},
	{
		name: "gone-is-reset", what: "a peer that is gone is recorded as one that reset",
		file: "relay/link.go", old: "end++ // ClientTimeout", new: "// ClientTimeout",
		pkg: "relay", test: "TestTimeoutIsNotAReset",
	},
	{
		name: "class-lost", what: "the client's DSCP does not reach the endpoint",
		file: "stream/tcpconn.go", old: "t.class = sys.ClientClass(int(t.client), t.record.VIP.Addr().Is6())", new: "t.class = 0 * sys.ClientClass(int(t.client), t.record.VIP.Addr().Is6())",
		pkg: "stream", test: "TestEndpointGetsTheClientsDSCP",
	},
	{
		name: "sctp-steered", what: "SCTP gets no socket at its destination",
		file: "listener/destination.go", old: "bound: own || unsteered || m.traits.BindEach", new: "bound: own || m.traits.BindEach",
		pkg: "listener", test: "TestUnsteeredProtocolIsBound",
	},
	{
		name: "sctp-not-regained", what: "SCTP ports refuse for ever on a kernel that gets SCTP later",
		file: "listener/manager.go", old: "m.incomplete || m.regained() ||", new: "m.incomplete ||",
		pkg: "listener", test: "TestProtocolThatTheKernelLacks",
	},
	{
		name: "message-relabelled", what: "an SCTP message that waited for room leaves on another stream",
		file: "message/direction.go", old: "\t\ts.info = info\n\t\tl.block(i)", new: "\t\tl.block(i)",
		pkg: "message", test: "TestLinkAgainstModel",
	},
	{
		name: "message-overtaken", what: "an ABORT overtakes an SCTP message that waits for room",
		file: "message/direction.go", old: "if !waits || now >= l.until", new: "if waits || now >= l.until",
		pkg: "message", test: "TestLinkAgainstModel",
	},
	{
		name: "message-cut", what: "an SCTP message that arrives in parts is passed on in parts",
		file: "message/direction.go", old: "if s.state&partial == 0 && !part {", new: "if s.state&partial == 0 {",
		pkg: "message", test: "TestLinkAgainstModel",
	},
	{
		name: "messages-unbounded", what: "the memory of held SCTP messages is not given back",
		file: "message/direction.go", old: "w.reserve(-s.reserved)", new: "w.reserve(0)",
		pkg: "message", test: "TestLinkAgainstModel",
	},
	{
		name: "message-spin", what: "a busy loop, while an SCTP receiver has no room",
		file: "message/link.go", old: "if s.state&(blocked|ended) == 0 {\n\t\twant |= poll.Readable", new: "if s.state&ended == 0 {\n\t\twant |= poll.Readable",
		pkg: "message", test: "TestLinkAgainstModel",
	},
	{
		name: "message-starved", what: "a busy loop, while the kernel lacks memory for SCTP messages",
		file: "message/direction.go", old: "\t\t\tl.starve(i)\n", new: "",
		pkg: "message", test: "TestLinkWaitsForTheKernelsMemory",
	},
	{
		name: "message-endless", what: "an SCTP association goes on for ever after a send has met its error",
		file: "message/direction.go", old: "\t\tother.failed = uint8(e)\n", new: "",
		pkg: "message", test: "TestLinkAgainstModel",
	},
	{
		name: "clock-stale", what: "the loop's clock stands still during a long wait",
		file: "internal/poll/loop.go", old: "\t\t\tl.age = clockRounds\n", new: "",
		pkg: "internal/poll", test: "TestClock",
	},
	{
		name: "association-left", what: "associations that wait for their turn get no ABORT when the proxy stops",
		file: "stream/retries.go", old: "is := r.waiting[p].head.record.Protocol == protocol", new: "is := r.waiting[p].head.record.Protocol != protocol",
		pkg: "stream", test: "TestForgettingAProtocol",
	},
	{
		name: "init-admitted", what: "a socket that drops admits SCTP clients, and drops all else",
		file: "internal/sockfilter/sockfilter.go", old: "K: chunkINIT, Jt: 1, Jf: 0", new: "K: chunkINIT, Jt: 0, Jf: 1",
		pkg: "internal/sockfilter", test: "TestNoAssociations",
	},
	{
		name: "queue-of-batches", what: "the access log's queue is full of batches with one record each",
		file: "conntrack/queue.go", old: "room = min(n, q.limit-q.waiting)", new: "room = n\n\t\tif len(q.full) >= q.limit/batchSize {\n\t\t\troom = 0\n\t\t}",
		pkg: "conntrack", test: "TestQueueBoundCountsRecords",
	},
	{
		name: "banner-lost", what: "an endpoint that answers and resets at once is tried as if it had refused",
		file: "relay/probe.go", old: "(e == sys.ECONNRESET || e == sys.EPIPE) && w.saved(", new: "false && w.saved(",
		pkg: "relay", test: "TestProbeDeliversWhatCameBeforeAReset",
	},
	{
		name: "source-waits", what: "the node's own connections fail for longer when its address is removed",
		file: "redirect/mode/mode.go", old: "o.Gone = r.Follow", new: "o.Gone = nil",
		pkg: "redirect/mode", test: "TestRoutesFollowTheirSourceBeforeVerify",
	},

	// In what tenants, processes of the node and strangers may do.
	{
		name: "endpoint-on-node", what: "a slice may name an address of the node as its endpoint",
		file: "service/endpoint.go", old: "s.hosts.own.Has(at.Addr) && !e.Local", new: "false && !e.Local",
		pkg: "service", test: "TestEndpointsThatLeadAstray",
	},
	{
		name: "external-ips-allowed", what: "--external-ips forbids nothing",
		file: "service/spec.go", old: "if !allowed.allow(a) {", new: "if false {",
		pkg: "service", test: "TestExternalIPsThatAreNotAllowed",
	},
	{
		name: "loopback-endpoint", what: "endpoints and external IPs may be loopback addresses",
		file: "service/address.go", old: "netip.MustParsePrefix(\"127.0.0.0/8\")", new: "netip.MustParsePrefix(\"127.255.255.255/32\")",
		pkg: "service", test: "TestEndpointsThatLeadAstray",
	},
	{
		name: "busy-goes-first", what: "a new health check closes one that is being answered before an idle one",
		file: "internal/httpport/group.go", old: "return c.worth() < o.worth()", new: "return c.worth() > o.worth()",
		pkg: "internal/httpport", test: "TestIdleGoesFirst",
	},
	{
		name: "lock-squatted", what: "any user may keep the proxy from starting",
		file: "redirect/lock.go", old: "if listens && holder.maySteer() {", new: "if listens {",
		pkg: "redirect", test: "TestSquatterDoesNotHoldTheLock",
	},
	{
		name: "socket-joined", what: "another process of this user takes a share of the datagrams",
		file: "internal/sys/udp.go", old: "Disown(fd) // without", new: "// without",
		pkg: "datagram", test: "TestSocketsCannotBeJoined",
	},
	{
		name: "namespace-takes-ports", what: "one namespace takes all sockets of node ports and external IPs",
		file: "listener/quotas.go", old: "if has := q.namespaces[h.namespace]; has > 0 && has+h.sockets", new: "if has := q.namespaces[h.namespace]; has < 0 && has+h.sockets",
		pkg: "listener", test: "TestNoNamespaceTakesAllBoundPorts",
	},
	{
		name: "special-files", what: "a symlink to a file of the kernel, such as /proc/kmsg, is read as a manifest",
		file: "internal/sys/file.go", old: "kernel != \"\" {", new: "kernel == \"none\" {",
		pkg: "source/manifests", test: "TestOnlyRegularFilesOfRealFileSystemsAreRead",
	},
	{
		name: "linked-directories", what: "a symlink to / is walked whole",
		file: "source/manifests/files.go", old: "linked && w.linked >= maxLinkedDirs {", new: "false {",
		pkg: "source/manifests", test: "TestDirectoriesBehindSymlinksAreBounded",
	},
	{
		name: "maintenance-put-off", what: "each change puts the next look at the kernel's state off",
		file: "node/loop.go", old: "p.maintained.Add(p.nextMaintenance())", new: "time.Now().Add(p.nextMaintenance())",
		pkg: "test/e2e", test: "TestPortThatAnotherProgramHoldsIsNotTaken",
	},
	{
		name: "others-table", what: "another program's table of our name is removed",
		file: "redirect/tproxy/reader.go", old: "return c.marked || len(c.sets) > 0 &&", new: "return true || len(c.sets) > 0 &&",
		pkg: "redirect/tproxy", test: "TestSomebodyElsesTableOfOurName",
	},

	// In the tests.
	{
		name: "errors-end-no-test", what: "tests go on after an error that should end them",
		file: "test/must/must.go", old: "\t\tt.Fatal(err)\n", new: "",
		pkg: "test/must", test: "TestErrorsEndTests",
	},
	{
		name: "differences-pass", what: "tests do not see that what they got is not what they want",
		file: "test/check/check.go", old: "if got != want {\n\t\tt.Helper()\n\t\tt.Error(", new: "if false {\n\t\tt.Helper()\n\t\tt.Error(",
		pkg: "test/check", test: "TestDifferencesAreReported",
	},
	{
		name: "differences-end-no-test", what: "tests go on after a difference that should end them",
		file: "test/must/must.go", old: "\t\tt.Fatal(check.Difference(got, want))\n", new: "",
		pkg: "test/check", test: "TestDifferencesAreReported",
	},
}

// mutations are all of them.
var mutations = slices.Concat(promises, faults, flows, layouts, tables, neighbours, names, views, idle)
