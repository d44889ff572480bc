package main

// idle are mistakes in what the process does while nothing happens.
var idle = []mutation{
	{
		name: "flow-sleeps-on", what: "a notice wakes no process that sleeps",
		file: "flow/bpf/upcall.h", old: "return BPF_RB_FORCE_WAKEUP;", new: "return BPF_RB_NO_WAKEUP;",
		pkg: "flow", test: "TestWorkerSleeps",
	},
	{
		name: "flow-sleeps-never", what: "a process without events looks for notices a hundred times a second",
		file: "flow/worker.go", old: "	if n == 0 {\n", new: "	if n < 0 {\n",
		pkg: "flow", test: "TestWorkerSleeps",
	},
	{
		name: "flow-wake-lost", what: "a notice that an upcall reads wakes nobody, nor do those after it",
		file: "flow/worker.go", old: "	if w.readNotices() > 0 {\n", new: "	if w.readNotices() < 0 {\n",
		pkg: "flow", test: "TestWorkerSleeps",
	},
	{
		name: "flow-beside-once", what: "packet filters beside nftables that come later are never seen",
		file: "flow/bypass/others.go", old: "	o.beside = nil\n", new: "",
		pkg: "flow/bypass", test: "TestOthersInTheStack",
	},
	{
		name: "poll-short-waits", what: "an idle loop waits twice for each timer",
		file: "internal/poll/loop.go", old: "l.quiet = n == 0 && !again", new: "l.quiet = false",
		pkg: "internal/poll", test: "TestQuietRoundWaitsOnce",
	},
}
