package main

import "slices"

// faults are mistakes that the product once had and that attacks found. Each mutation
// takes a mend back.
var faults = []mutation{
	// In the data path.
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
		file: "service/host.go", old: "{ return in(h.broadcast, a) }", new: "{ return false && in(h.broadcast, a) }",
		pkg: "service", test: "TestBroadcastAddressesAreNotServed",
	},
	{
		name: "service-unlimited", what: "a Service may have more connections than its limit",
		file: "stream/quota.go", old: "p.service.open.Load() > most {", new: "p.service.open.Load() > 1000*most {",
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
		file: "stream/accept.go", old: "c.class = sys.ClientClass(fd, vip.Addr().Is6())", new: "c.class = 0 * sys.ClientClass(fd, vip.Addr().Is6())",
		pkg: "stream", test: "TestEndpointGetsTheClientsDSCP",
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

	// In what tenants, processes of the node and strangers may do.
	{
		name: "endpoint-on-node", what: "a slice may name an address of the node as its endpoint",
		file: "service/endpoint.go", old: "s.hosts.isOwn(at.Addr) && !e.Local", new: "false && !e.Local",
		pkg: "service", test: "TestEndpointsThatLeadAstray",
	},
	{
		name: "external-ips-allowed", what: "--external-ips forbids nothing",
		file: "service/spec.go", old: "} else if !allowed.allow(a) {", new: "} else if false {",
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
		name: "others-table", what: "another program's table of our name is removed",
		file: "redirect/tproxy/reader.go", old: "return c.marked || len(c.sets) > 0 &&", new: "return true || len(c.sets) > 0 &&",
		pkg: "redirect/tproxy", test: "TestSomebodyElsesTableOfOurName",
	},
}

// mutations are all of them.
var mutations = slices.Concat(promises, faults)
