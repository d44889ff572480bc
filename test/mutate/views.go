package main

// views are mistakes of what shows connections: commands, records and metrics.
var views = []mutation{
	{
		name: "pcap-one-leg", what: "a capture has no packets between proxy and endpoint",
		file: "cmd/sluice/internal/capture/flows.go", old: "	f.leg(protocol, c.SourceAddr, c.Endpoint, w)\n", new: "",
		pkg: "test/e2e", test: "TestPacketsOfConnections",
	},
	{
		name: "pcap-no-wait", what: "packets do not wait until their connection matches",
		file: "cmd/sluice/internal/capture/capture.go", old: "now.Add(-c.bounds.Wait))", new: "now)",
		pkg: "test/e2e", test: "TestPacketsOfConnections",
	},
	{
		name: "past-forgotten", what: "sluice log has no record of before a take-over",
		file: "node/inherit.go", old: "p.past.Carry(&m)", new: "_ = m",
		pkg: "test/e2e", test: "TestPromise7_ThePastMoves",
	},
	{
		name: "past-of-the-last", what: "sluice log has no record of a connection that a take-over cuts at last",
		file: "node/close.go", old: "p.tellPorts(p.successor), p.tellPast()", new: "p.tellPorts(p.successor), error(nil)",
		pkg: "test/e2e", test: "TestTakeOverTimeout",
	},
	{
		name: "native-misplaced", what: "native histograms have durations where nothing took so long",
		file: "admin/histogram.go", old: "new(int32(gap))", new: "new(int32(b.Index))",
		pkg: "admin", test: "TestNativeHistograms",
	},
	{
		name: "duration-unmeasured", what: "the histogram of connections' durations counts no connection",
		file: "conntrack/counters.go", old: "	o.duration.observeIn(0, r.Duration, &DurationBuckets)\n", new: "",
		pkg: "conntrack", test: "TestCountersOfAConnection",
	},
	{
		name: "native-forgotten", what: "a take-over leaves native histograms behind, so that Prometheus refuses them",
		file: "conntrack/carry.go", old: "	o.Native.each(h.native.add)\n", new: "",
		pkg: "conntrack", test: "TestTotalsAreCarried",
	},
	{
		name: "history-forgotten", what: "the page's charts begin anew at each take-over",
		file: "node/handover.go", old: "p.tellPast(), p.tellHistory()", new: "p.tellPast()",
		pkg: "test/e2e", test: "TestPromise7_ThePastMoves",
	},
	{
		name: "past-misread", what: "records that another version has encoded are misread",
		file: "conntrack/movedpast.go", old: "if m.Format != pastFormat {", new: "if m.Format < 0 {",
		pkg: "conntrack", test: "TestPastOfAnotherFormat",
	},
	{
		name: "refusals-untold", what: "what is refused or dropped is a total and nothing more",
		file: "node/refusals.go", old: "p.conntrack.Refuse(list, more,", new: "p.conntrack.Refuse(nil, more+listed,",
		pkg: "test/e2e", test: "TestRefusalsAreTold/tproxy-nftables/relay",
	},
	{
		name: "refusals-of-ranges-untold", what: "what the kernel's table drops by source ranges is a count and nothing more",
		file: "flow/bpf/flow.bpf.c", old: "bpf_map_update_elem(&refused, &t, &one, BPF_ANY);", new: "(void)one;",
		pkg: "test/e2e", test: "TestRefusalsAreTold/tproxy-nftables/kernel",
	},
	{
		name: "refusals-told-again", what: "refusals of sk_lookup are told each second again",
		file: "redirect/sklookup/refusals.go", old: "r.each.BatchLookupAndDelete(", new: "r.each.BatchLookup(",
		pkg: "redirect/sklookup", test: "TestSteering/without_pins/refusals_are_counted",
	},
	{
		name: "refusals-read-as-damage", what: "what nftables has counted is taken for somebody's change, and repaired",
		file: "redirect/tproxy/filter.go", old: "for k := range counted { // the kernel fills that one", new: "for k := range kinds {",
		pkg: "redirect/tproxy", test: "TestCountsAreNoDamage",
	},
	{
		name: "refusals-told-twice", what: "refusals of nftables are told each second again",
		file: "redirect/tproxy/refusals.go", old: "before := r.seen[e.key]", new: "before := uint64(0)",
		pkg: "redirect/tproxy", test: "TestSteering/refusals_are_counted",
	},
	{
		name: "plugin-failures-mixed", what: "kubectl sluice failures sums up what several nodes saw as if it were one's",
		file: "cmd/sluice/kubectlrows.go", old: "			found.Failures[i].ProxyNode = node\n", new: "			_ = i\n",
		pkg: "cmd/sluice", test: "TestFailuresOfNodes",
	},
	{
		name: "page-node-unnamed", what: "the page of all nodes does not say which of them do not answer",
		file: "cmd/sluice/internal/allnodes/allnodes.go", old: "if n.trouble != nil {\n			p.Trouble", new: "if n.Trouble != nil {\n			p.Trouble",
		pkg: "cmd/sluice/internal/allnodes", test: "TestTogether",
	},
	{
		name: "page-waits-for-silent", what: "rates of a node that is gone stay among those of all",
		file: "cmd/sluice/internal/allnodes/streams.go", old: "if now.Sub(l.came) < fresh {", new: "if now.Sub(l.came) >= 0 {",
		pkg: "cmd/sluice/internal/allnodes", test: "TestRates",
	},
	{
		name: "page-node-not-followed-again", what: "a node that answers later stays out of the page's rates",
		file: "cmd/sluice/internal/allnodes/streams.go", old: "case <-time.After(time.Second): // is there another node?", new: "case <-time.After(time.Hour):",
		pkg: "cmd/sluice/internal/allnodes", test: "TestRates",
	},
	{
		name: "page-all-for-one", what: "the page of all nodes asks the first one whichever is chosen",
		file: "cmd/sluice/internal/allnodes/allnodes.go", old: "return n.Name == name })\n	if at", new: "return n.Name != \"\" })\n	if at",
		pkg: "cmd/sluice/internal/allnodes", test: "TestOneNode",
	},
	{
		name: "page-without-older", what: "one node of an older build keeps the page of all nodes empty",
		file: "cmd/sluice/internal/allnodes/streams.go", old: `older.Del("quiet")`, new: `older.Del("quite")`,
		pkg: "cmd/sluice/internal/allnodes", test: "TestRates",
	},
	{
		name: "flows-uncounted", what: "sluice status counts what is relayed alone",
		file: "cmd/sluice/internal/show/status.go", old: "at most %d\", s.Flows, s.FlowsLimit)", new: "at most %d\", s.Connections, s.FlowsLimit)",
		pkg: "test/e2e", test: "TestStatusCountsFlows",
	},
	{
		name: "story-of-today", what: "the page does not say that the configuration has changed since a connection opened",
		file: "web/assets/js/story.js", old: "sentence(), outdated(), reasons", new: "sentence(), reasons",
		pkg: "test/web", test: "TestPage/Story",
	},
	{
		name: "story-told-of-today", what: "sluice story does not say that a Service has changed since a connection opened",
		file: "cmd/sluice/internal/show/story.go", old: "case now.Since.After(c.Time):", new: "case now.Since.Before(c.Time):",
		pkg: "test/e2e", test: "TestStoryOfAnotherConfiguration",
	},
	{
		name: "story-of-any-change", what: "a change of one Service counts as one of all",
		file: "node/changes.go", old: "for id := range t.Changed(prev) {", new: "for id := range service.PortID(len(at)) {",
		pkg: "test/e2e", test: "TestStoryOfAnotherConfiguration",
	},
	{
		name: "socket-of-the-able", what: "a proxy with few capabilities takes the machine's network namespace for another one",
		file: "live/socket/name.go", old: `inode("/proc/self/net/dev") == inode("/proc/1/net/dev")`, new: `Namespace() == inode("/proc/1/ns/net")`,
		pkg: "live/socket", test: "TestOthers",
	},
	{
		name: "doctor-unwrapped", what: "lines of sluice doctor are as long as its reasons",
		file: "cmd/sluice/internal/doctor/text.go", old: "utf8.RuneCountInString(word) <= width {", new: "width >= 0 {",
		pkg: "cmd/sluice/internal/doctor", test: "TestNoLineIsLong",
	},
	{
		name: "page-gets-quiet-rows", what: "a page gets each second what nothing happens to",
		file: "live/serve/rates.go", old: "if !quiet {", new: "if !quiet && limit < 0 {",
		pkg: "live/serve", test: "TestStreams",
	},
	{
		name: "page-not-paused", what: "a page that is paused goes on asking and drawing",
		file: "web/assets/js/store.js", old: "  rest(on);\n", new: "",
		pkg: "test/web", test: "TestPage/Records",
	},
	{
		name: "page-clients-at-full", what: "the map's clients add up to more than what is new, where each comes once",
		file: "web/assets/js/store.js", old: "if (!first) for (const name of smooth) fresh[name] *= share;", new: "",
		pkg: "test/web", test: "TestNumbers",
	},
	{
		name: "page-blames-the-saved", what: "the map blames an endpoint for attempts alone, and not for connections that it resets",
		file: "web/assets/js/store.js", old: "r.broken + r.failed_attempts", new: "r.failed_attempts",
		pkg: "test/web", test: "TestPage/Blame",
	},
	{
		name: "exemplar-of-fast", what: "histograms name connections that were not slow",
		file: "conntrack/counters.go", old: "if id != 0 && ns > int64(slow) {", new: "if ns > 0 {",
		pkg: "admin", test: "TestExemplars",
	},
	{
		name: "exemplar-of-none", what: "histograms name no connection",
		file: "admin/histogram.go", old: "if s := counts.Slow; s.ID != 0 {", new: "if s := counts.Slow; s.ID > 1<<63 {",
		pkg: "admin", test: "TestExemplars",
	},
	{
		name: "absent-is-silent", what: "an endpoint that has gone from its link is said to be silent",
		file: "host/kernel/neighbours.go", old: "netlink.NUD_INCOMPLETE|netlink.NUD_FAILED) != 0", new: "netlink.NUD_PERMANENT) != 0",
		pkg: "test/e2e", test: "TestQuestionNamesTheRightPod",
	},
	{
		name: "drop-is-silence", what: "an endpoint to which a rule of this node drops packets is said to be silent",
		file: "stream/conn.go", old: "return conntrack.DialDropped", new: "return conntrack.DialTimeout",
		pkg: "test/e2e", test: "TestQuestionNamesTheRightPod/relay/dropped",
	},
	{
		name: "flow-drop-is-silence", what: "the same, of a connection that the kernel forwards",
		file: "flow/dial.go", old: "why = conntrack.DialDropped", new: "why = conntrack.DialTimeout",
		pkg: "test/e2e", test: "TestQuestionNamesTheRightPod/kernel/dropped",
	},
	{
		name: "idle-is-busy", what: "a story says of a connection on which nothing is sent that both sides send",
		file: "live/verdict.go", old: "t != nil && t.Idle > stalled:", new: "t != nil && t.Idle > 1<<62:",
		pkg: "live", test: "TestJudge",
	},
	{
		name: "lasted-without-ends", what: "rates say of no connection how long it lasted",
		file: "live/meter.go", old: "			g.Lasted.Add(time.Duration(r.Duration))\n", new: "",
		pkg: "live", test: "TestMeterBlamesTheRightEndpoint",
	},
	{
		name: "few-durations-unsorted", what: "of a few durations the last one is the longest",
		file: "live/durations.go", old: "		slices.Sort(few[:d.count])\n", new: "		_ = slices.Sort[[]uint8]\n",
		pkg: "live", test: "TestFewDurations",
	},
	{
		name: "drop-before-its-attempt", what: "a drop at the beginning of an attempt is taken for one of before it, and the endpoint is said to be silent",
		file: "stream/conn.go", old: "sys.Monotonic()-c.record.Attempting(poll.Nanotime())", new: "sys.Monotonic()-c.record.Attempting(poll.Nanotime())+1e6",
		pkg: "test/e2e", test: "TestEachDropIsNamed/relay",
	},
	{
		name: "drop-of-yesterday", what: "a rule that was removed is blamed for each later silence",
		file: "host/drops/drops.go", old: "err == nil && int64(at) >= since", new: "err == nil",
		pkg: "host/drops", test: "TestDropped",
	},
	{
		name: "tap-loss-miscounted", what: "a slow reader of records is told a wrong number of what it has lost",
		file: "conntrack/tap.go", old: "p.loseLocked(1)", new: "p.loseLocked(2)",
		pkg: "conntrack", test: "TestSlowTapLosesItsOwnRecords",
	},
	{
		name: "tap-loss-told-when-nothing-waits", what: "a reader of records that is always too slow is never told of its loss",
		file: "conntrack/tap.go", old: "p.ahead -= min(n, p.ahead); p.ahead == 0 {", new: "p.ahead -= min(n, p.ahead); p.count == 0 {",
		pkg: "conntrack", test: "TestAlwaysSlowTapIsToldItsLoss",
	},
	{
		name: "drain-forgets-local-policy", what: "sluice drain does not say that a pod still serves ports whose traffic policy is Local",
		file: "live/serve/drain.go", old: "drained.Local && (p.InternalLocal || p.ExternalLocal) &&", new: "drained.Local && p.InternalLocal && p.ExternalLocal &&",
		pkg: "live/serve", test: "TestLastResort",
	},
	{
		name: "walks-never-rest", what: "clients that list all connections again and again take the event loops' time",
		file: "conntrack/list.go", old: "restShare = 4", new: "restShare = 0",
		pkg: "conntrack", test: "TestWalksRest",
	},
	{
		name: "proxy-of-another-namespace", what: "a command asks the only proxy of the machine, which serves another network namespace",
		file: "live/client/find.go", old: "c.Version.Namespace != namespace:", new: "c.Version.Namespace == 0:",
		pkg: "live/client", test: "TestFindHere",
	},
	{
		name: "admin-clients-unbounded", what: "clients of the admin socket take as many descriptors as they like",
		file: "live/socket/socket.go", old: "maxConnections = 64", new: "maxConnections = 6400",
		pkg: "test/e2e", test: "TestHostileClientsOfTheSocket",
	},
	{
		name: "others-may-act", what: "every user who reaches the admin socket may end connections",
		file: "live/socket/socket.go", old: "err == nil && (peer.Uid == 0 || int(peer.Uid) == os.Geteuid())", new: "err == nil && peer != nil",
		pkg: "live/socket", test: "TestOthers",
	},
	{
		name: "read-only-may-act", what: "readers of the forwarded page are told that they may end connections",
		file: "live/serve/serve.go", old: `r.Header.Get(api.ReadOnly) == "" && `, new: ``,
		pkg: "live/serve", test: "TestReadOnly",
	},
	{
		name: "host-check-off", what: "the page answers to any name, so that any site may be its own origin",
		file: "web/hosts.go", old: "\tif err != nil {\n\t\treturn false\n\t}", new: "\tif err != nil {\n\t\treturn true\n\t}",
		pkg: "web", test: "TestHosts",
	},
	{
		name: "page-acts", what: "the page passes actions on to the admin socket",
		file: "web/web.go", old: "r.Method != http.MethodGet && r.Method != http.MethodHead", new: "r.Method == http.MethodTrace",
		pkg: "web", test: "TestReadsOnly",
	},
	{
		name: "page-for-other-sites", what: "pages of other sites may open streams of the page's API",
		file: "web/web.go", old: "case \"\", \"same-origin\", \"none\":", new: "case \"\", \"same-origin\", \"none\", \"same-site\", \"cross-site\":",
		pkg: "web", test: "TestReadsOnly",
	},
	{
		name: "inline-scripts", what: "the page's policy allows scripts in its markup",
		file: "web/web.go", old: "script-src 'self';", new: "script-src 'self' 'unsafe-inline';",
		pkg: "web", test: "TestPolicy",
	},
	{
		name: "flow-again-uncounted", what: "nobody counts the segments of kernel flows that are sent again",
		file: "flow/bpf/track.h", old: "f->again[from] += p->payload || (fin && (p->flags & FIN)) ? n : 0;", new: ";",
		pkg: "flow", test: "TestSegmentsThatAreSentAgain",
	},
	{
		name: "flow-reordered-lost", what: "segments of kernel flows that overtake each other are taken for lost",
		file: "flow/bpf/track.h", old: "else if ((f->seen & (from ? ENDPOINT_MISSED : CLIENT_MISSED)) && p->sequence == end", new: "else if ((f->seen & (from ? ENDPOINT_AHEAD : CLIENT_AHEAD)) && p->sequence == end",
		pkg: "flow/bpf", test: "TestModelOfConnections",
	},
	{
		name: "flow-retry-again", what: "the SYN that goes to another endpoint is taken for one that the client has sent again",
		file: "flow/bpf/track.h", old: "skb->tc_index != PUT_BACK)))", new: "skb->tc_index != 1)))",
		pkg: "flow", test: "TestSYNsThatAreSentAgain",
	},
	{
		name: "flow-again-both", what: "segments that are sent again to the endpoint are shown as the client's",
		file: "flow/flow.go", old: "LoadUint32(&k.Again[1-i])", new: "LoadUint32(&k.Again[i])",
		pkg: "flow", test: "TestSegmentsThatAreSentAgain",
	},
}
