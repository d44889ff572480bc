package main

// neighbours are mistakes about other programs on the node, and about what operators see.
var neighbours = []mutation{
	{
		name: "changes-drop-foreign-data", what: "connections to addresses that are not ours end when no endpoint is left, with iptables",
		file: "redirect/iptables/rules.go", old: "\t\tw.rule(\"FOREIGN\", isUnderWay, isTransparent, \"-g %MARK\")\n", new: "",
		pkg: "redirect/iptables", test: "TestSteering/nft/ipset/non-local_addresses",
	},
	{
		name: "answers-untranslated", what: "where a network plugin masquerades, a tracked connection with the client's address gets no answers",
		file: "redirect/tproxy/ruleset.go", old: "answersPriority nftables.ChainPriority = -90", new: "answersPriority nftables.ChainPriority = -310",
		pkg: "redirect/tproxy", test: "TestConnectionsToEndpointsAreKept/keep",
	},
	{
		name: "kept-untracked", what: "--conntrack keep keeps nothing, and endpoints that may open nothing cannot answer",
		file: "redirect/tproxy/rules.go", old: "\tif n.kept {\n\t\treturn", new: "\tif false {\n\t\treturn",
		pkg: "redirect/tproxy", test: "TestConnectionsToEndpointsAreKept/keep",
	},
	{
		name: "connection-unmarked", what: "the same as answers-untranslated, with iptables",
		file: "redirect/iptables/rules.go", old: "|| !w.connmark {", new: "|| w.connmark {",
		pkg: "redirect/iptables", test: "TestConnectionsToEndpointsAreKept/nft",
	},
	{
		name: "state-unseen", what: "--conntrack auto does not notice a firewall in nftables",
		file: "host/firewall/nftables.go", old: "attrCTKey), ctState)", new: "attrCTKey), ctState+100)",
		pkg: "host/firewall", test: "TestStateRule",
	},
	{
		name: "bpffs-read-only", what: "doctor and status take a BPF file system for one that keeps pins, although it is read-only",
		file: "internal/bpffs/bpffs.go", old: "case !writable:", new: "case !writable && root == \"\":",
		pkg: "internal/bpffs", test: "TestPlacesThatAreNotUsed",
	},
	{
		name: "kube-proxy-counts", what: "kube-proxy's own rules have --conntrack auto track everything",
		file: "host/firewall/firewall.go", old: "return !strings.HasPrefix(chain, kubeProxyPrefix) &&", new: "return",
		pkg: "host/firewall", test: "TestStateRule",
	},
	{
		name: "close-wait-lost", what: "without kube-proxy, CLOSE_WAIT lasts a minute on the node",
		file: "host/tracking/tracking.go", old: "seconds(s.CloseWait), protocolTCP", new: "0, protocolTCP",
		pkg: "host/tracking", test: "TestKernelTakesTheSettings",
	},
	{
		name: "unread-source-range-passes", what: "a manifest with an invalid source range is used without that range",
		file: "source/manifests/check_restrictions.go", old: "c.cidr(at(\"spec.loadBalancerSourceRanges[%d]\", i), r)", new: "c.optionalCIDR(at(\"spec.loadBalancerSourceRanges[%d]\", i), r)",
		pkg: "source/manifests", test: "TestInvalidRestrictionsAreRefused",
	},
	{
		name: "not-ready-hides-ready", what: "of two entries for one endpoint the last one counts, also if it is not ready",
		file: "service/slice.go", old: "if standing(e) < standing(was) {", new: "if false {",
		pkg: "service", test: "TestSliceIntake",
	},
	{
		name: "restored-store-goes-unseen", what: "a watch goes on from a version that a restored store has not reached",
		file: "source/kubernetes/watch.go", old: "theirs >= ours", new: "theirs > 0",
		pkg: "source/kubernetes", test: "TestRestoredStore",
	},
	{
		name: "transports-of-others", what: "all connections of a page have what the last one's transport says",
		file: "live/page.go", old: "\t\tt := *t\n\t\tkept.SetTransport(&t)", new: "\t\tkept.SetTransport(t)",
		pkg: "live", test: "TestTransportIsAskedWhenNeeded",
	},
	{
		name: "clients-not-suggested", what: "the shell does not suggest the pods of clients that serve nothing",
		file: "live/serve/complete.go", old: `field == "client_pod" && h.options.Pods`, new: `field == "client" && h.options.Pods`,
		pkg: "live/serve", test: "TestClientPodsAreSuggested",
	},
	{
		name: "record-after-the-sockets", what: "TCP is asked about a relayed connection when its sockets are closed",
		file: "stream/tcpconn.go", old: "t.worker.shard.Note(&t.record)", new: "",
		pkg: "test/e2e", test: "TestRecordsSayWhatTCPSays/relay",
	},
	{
		name: "flow-forgets-what-it-saw", what: "the record of a kernel flow has nothing that packets have said",
		file: "flow/flow.go", old: "f.state() < bpf.KernelStateOPEN ||", new: "f.state() != bpf.KernelStateOPEN ||",
		pkg: "test/e2e", test: "TestRecordsSayWhatTCPSays/kernel",
	},
	{
		name: "records-ask-unasked", what: "each connection costs system calls for its record, though nobody asked for what TCP says",
		file: "conntrack/transport.go", old: "!ok || !s.table.tcp ||", new: "!ok ||",
		pkg: "conntrack", test: "TestRecordsHaveTransports",
	},
	{
		name: "closed-window-is-the-network", what: "a pod that does not read passes for a bad network",
		file: "live/verdict.go", old: "s.Unsent > 0 && s.Window == 0", new: "s.Unsent > 0 && s.Window == 1",
		pkg: "test/e2e", test: "TestStoryNamesWhoIsWaitedFor",
	},
	{
		name: "flows-without-acknowledgements", what: "a kernel flow takes one side's acknowledgements for the other's",
		file: "flow/flow.go", old: "&k.Way[1-i].End), atomic.LoadUint32(&k.Way[i].Acked)", new: "&k.Way[i].End), atomic.LoadUint32(&k.Way[1-i].Acked)",
		pkg: "test/e2e", test: "TestStoryNamesWhoIsWaitedFor",
	},
	{
		name: "saved-attempts-blamed", what: "attempts that another endpoint made good count as failures of clients",
		file: "live/meter.go", old: "saved = 1\n", new: "saved = 0\n",
		pkg: "live", test: "TestMeterBlamesTheRightEndpoint",
	},
	{
		name: "silence-is-not-slow", what: "an endpoint that never answers is passed over",
		file: "live/meter.go", old: "unanswered := r.BytesFromClient > 0 && r.BytesFromEndpoint == 0", new: "unanswered := false",
		pkg: "test/e2e", test: "TestSlowEndpointIsNamed",
	},
	{
		name: "others-attempts-blamed", what: "an endpoint is blamed for the time that attempts at others took",
		file: "live/meter.go", old: "before = beforeEndpoint(r)", new: "before = r.WaitTime()",
		pkg: "live", test: "TestMeterBlamesTheRightEndpoint",
	},
	{
		name: "fewest-failures-first", what: "who fails most is at the end of the list",
		file: "cmd/sluice/internal/blame/blame.go", old: "cmp.Compare(b.Count, a.Count)", new: "cmp.Compare(a.Count, b.Count)",
		pkg: "cmd/sluice/internal/blame", test: "TestSum",
	},
	{
		name: "full-endpoint-untold", what: "nothing says that an endpoint has all connections that it may have",
		file: "live/standing.go", old: "Full: s.Full}", new: "Full: false}",
		pkg: "test/e2e", test: "TestQuestionNamesTheRightPod",
	},
	{
		name: "pods-confused", what: "a process of the node passes for one of the pods with the node's network",
		file: "live/serve/pods.go", old: "several = several || all[n].Pod != all[0].Pod", new: "several = false",
		pkg: "live/serve", test: "TestClientPods",
	},
	{
		name: "pods-of-yesterday", what: "a long tap names the pod that had a client's address when it began",
		file: "live/serve/pods.go", old: "x.of != p.snapshot() && ", new: "x.of == nil && ",
		pkg: "live/serve", test: "TestPodsFollowTheConfiguration",
	},
	{
		name: "pods-of-the-dead", what: "a pod's old address names it, though another pod may have it",
		file: "source/kubernetes/pods.go", old: "if p.names[a] == name {", new: "if p.names[a] != name {",
		pkg: "source/kubernetes", test: "TestPodsOfThisNode",
	},
	{
		name: "pods-of-the-host", what: "pods with the node's network have its address for theirs",
		file: "source/kubernetes/pods.go", old: "if p.Spec.HostNetwork || ", new: "if ",
		pkg: "source/kubernetes", test: "TestPodsOfThisNode",
	},
	{
		name: "client-pods-unnamed", what: "records do not say which pod is the client",
		file: "live/serve/connections.go", old: "e.ClientPod = h.pods.At", new: "e.ClientPod = nil",
		pkg: "test/e2e", test: "TestClientsPodsAreNamed",
	},
	{
		name: "conntrack-beside", what: "beside another proxy, Sluice changes that one's kernel settings",
		file: "cmd/sluice/conntrack.go", old: "case o.serviceProxyName != \"\":", new: "case false:",
		pkg: "cmd/sluice", test: "TestConntrackSettingsInKubeProxysPlace",
	},
	{
		name: "override-untold", what: "flags beside --config are dropped without a word",
		file: "cmd/sluice/kubeproxy.go", old: "givenOf(flags, overriddenByFile); len(names) > 0", new: "givenOf(flags, overriddenByFile); len(names) < 0",
		pkg: "cmd/sluice", test: "TestFlagsBesideAConfigurationFile",
	},
	{
		name: "missing-node-untold", what: "/healthz is 503 for ever, and the log is silent",
		file: "node/ownnode.go", old: "d.timer.Reset(nodePatience)", new: "",
		pkg: "node", test: "TestMissingNodeIsLogged",
	},
	{
		name: "update-lost", what: "a changed configuration file does not reach the policy",
		file: "node/update.go", old: "p.config.Policy = u.Policy", new: "",
		pkg: "node", test: "TestProxyInTheProcess",
	},
	{
		name: "legacy-chains-untold", what: "cleanup --kube-proxy says that nothing is left while chains of iptables-legacy are",
		file: "redirect/iptables/others.go", old: "left, err = legacyChains(", new: "_, err = legacyChains(",
		pkg: "redirect/iptables", test: "TestLegacyChainsAreNamedWithoutPrograms",
	},
	{
		name: "log-rate-ignored", what: "the access log fills the node's disk",
		file: "conntrack/lograte.go", old: "case b.lines < b.most:", new: "case b.most > 0:",
		pkg: "conntrack", test: "TestLogRate",
	},
	{
		name: "annotation-unread", what: "sluice.dev/access-log of a Service has no effect",
		file: "conntrack/lograte.go", old: "if r.Port != nil && r.Port.Annotations != nil {", new: "if false {",
		pkg: "conntrack", test: "TestLogOfAService",
	},
	{
		name: "strays-untold", what: "a slice whose Service does not exist is silent",
		file: "source/manifests/belonging.go", old: "case len(found) == 0:", new: "case true:",
		pkg: "source/manifests", test: "TestSlicesThatBelongNowhere",
	},
	{
		name: "newcomer-displaces", what: "a new manifest takes the place of the object that is served",
		file: "source/manifests/catalog.go", old: "first, had := since[o.key]\n\t\tif !had {", new: "first, had := since[o.key]\n\t\tif !had && first > 0 {",
		pkg: "source/manifests", test: "TestTwoObjectsWithOneName",
	},
	{
		name: "annotation-unknown", what: "a misspelled annotation is silent",
		file: "source/manifests/check_restrictions.go", old: "if !slices.Contains(service.Annotations, name) {", new: "if false {",
		pkg: "source/manifests", test: "TestAnnotationsThatAreNotKnown",
	},
	{
		name: "error-repeated", what: "an error of both address families is printed twice",
		file: "cmd/sluice/log.go", old: "|| strings.HasSuffix(said, \": \"+line)", new: "",
		pkg: "cmd/sluice", test: "TestLogNamesUnitsAndErrorsOnce",
	},
	{
		name: "no-units", what: "the log says took=128.3",
		file: "cmd/sluice/log.go", old: "zerolog.DurationFieldFormat = zerolog.DurationFormatString", new: "_ = zerolog.DurationFormatString",
		pkg: "cmd/sluice", test: "TestLogNamesUnitsAndErrorsOnce",
	},
	{
		name: "cleanup-help", what: "the help of sluice cleanup lists every flag of sluice run",
		file: "cmd/sluice/cleanup.go", old: "return names.Lookup(flag) != nil", new: "return true",
		pkg: "cmd/sluice", test: "TestCleanupTakesTheFlagsOfRun",
	},
	{
		name: "flow-syn-comes-in-again", what: "a SYN to an endpoint behind the node's macvlan gets another port on its way",
		file: "flow/bpf/direct.h", old: "		return p->sequence == f->first_sequence;", new: "		return 0;",
		pkg: "flow", test: "TestPacketsThatComeInAgain",
	},
	{
		name: "flow-datagram-comes-in-again", what: "a datagram to an endpoint behind the node's macvlan gets another port on its way",
		file: "flow/bpf/direct.h", old: "return skb->pkt_type == PACKET_OTHERHOST && ", new: "return skb->pkt_type != PACKET_OTHERHOST && ",
		pkg: "flow", test: "TestPacketsThatComeInAgain",
	},
	{
		name: "flow-translated-shortcut", what: "packets take the shortcut past rules that have translated the first one",
		file: "flow/bpf/shortcut.h", old: "	if (!(f->seen & PASSED))\n		return 0;\n	if (f->state == OPEN)", new: "	if (f->state == OPEN)",
		pkg: "flow/bpf", test: "TestModelOfShortcuts",
	},
	{
		name: "flow-translated-open", what: "rules that translate sources give an open connection another port when its shortcuts end",
		file: "flow/tracked.go", old: "		chain, err = firewall.Translation(s.options.Namespace, s.options.Name)\n", new: "",
		pkg: "flow", test: "TestRulesThatTranslateKeepOpenConnections",
	},
	{
		name: "changes-refuse-lookup", what: "a Service that goes refuses clients for a moment in which it is neither served nor silent",
		file: "redirect/sklookup/tables.go", old: "	for _, a := range c.ClusterIPs.Drop {\n",
		new: "	for d := range c.Touched {\n		if _, is := t.verdict(p, d); !is {\n			note(t.deleteDestination(d))\n		}\n	}\n	for _, a := range c.ClusterIPs.Drop {\n",
		pkg: "redirect/sklookup", test: "TestChangeGivesNoThirdAnswer",
	},
	{
		name: "changes-refuse-ipset", what: "the same, with iptables and ipset",
		file: "redirect/iptables/contents.go", old: "slices.Reverse(e.drop)", new: "slices.Reverse(e.drop[:0])",
		pkg: "redirect/iptables", test: "TestEditsLeadFromPlanToPlan",
	},
}
