package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/peer"
)

// options are the command line's settings.
type options struct {
	peers      []peer.Peer
	columns    []column
	rounds     int
	measure    time.Duration // of one measurement
	long       time.Duration // of a long run
	warmup     time.Duration // before it
	threads    int           // of the relay, if it can be set
	endpoints  int
	ipv6       bool
	sctp       bool   // the columns of SCTP
	neighbours bool   // the node has the rules of a cluster's node
	inside     bool   // this is the guest
	control    string // TCP congestion control; empty for the system's
	out        string // directory of the page, the chart and the JSON; empty for none
	builds     peer.Builds
	keepLogs   bool
	mode       func(*bench) error
}

// parseFlags returns nil options if the user asked for help.
func parseFlags(args []string) (*options, error) {
	o := &options{mode: (*bench).compare}
	f := flag.NewFlagSet("bench", flag.ContinueOnError)
	f.Usage = func() { usage(f) }
	peers := f.String("peers", "", "peers to compare, separated by commas (default: all without a mark)")
	columns := f.String("columns", "", "columns to measure, separated by commas (default: all without a mark)")
	quick := f.Bool("quick", false, "one short run of the main columns, under a minute; for a first look, not for figures")
	f.IntVar(&o.rounds, "rounds", 9, "number of measurements of everything")
	seconds := f.Float64("seconds", 0.35, "length of each measurement")
	f.DurationVar(&o.long, "long", 20*time.Second, "length of the long runs")
	f.IntVar(&o.threads, "threads", runtime.NumCPU(), "threads or workers of HAProxy and nginx")
	f.IntVar(&o.endpoints, "endpoints", 1, "addresses of the server, among which the relays spread connections")
	f.BoolVar(&o.ipv6, "6", false, "IPv6 instead of IPv4")
	f.BoolVar(&o.neighbours, "neighbours", false, "give the node the rules of the kubelet, flannel and portmap")
	f.StringVar(&o.control, "congestion", "reno", "`name` of the TCP congestion control of all, or system for the machine's")
	from := f.String("from", "", "`file`: measure nothing, and write the report of this benchmarks.json again")
	f.StringVar(&o.out, "o", "", "directory for benchmarks.md, .json and .svg (default: docs for a whole run, else none)")
	f.StringVar(&o.builds.Sluice, "sluice", "bin/sluice", "the product's binary")
	f.StringVar(&o.builds.Base, "base", "", "another build of the product, the peer sluice-base")
	f.StringVar(&o.builds.HAProxy, "haproxy", "", "`file` of another HAProxy, the peer haproxy-other")
	f.StringVar(&o.builds.KubeProxy, "kube-proxy", "", "`file` of a kube-proxy: two more peers, and -scale measures it, too")
	f.BoolVar(&o.keepLogs, "keep", false, "keep the directory with configurations and logs, and print its name")
	soak := f.Uint64("soak", 0, "`N`: open and close N connections (1000000 or more is meaningful) and check the relay's memory and descriptors; uses the first of -peers, or sluice")
	slow := f.Duration("slow-reader", 0, "`time`: run fast writers and slow readers for this time, and check the relay's memory; uses the first of -peers, or sluice")
	open := f.Int("open", 0, "`N`: hold N connections open at once, go to the limit of descriptors, and back; uses the first of -peers, or sluice")
	lookedAt := f.Bool("looked-at", false, "measure what looking at the running product costs connections; -seconds should be 3 or more")
	look := f.String("look", "all,page,top,conns,tap,nobody", "`names` of ways to look, for -looked-at, separated by commas; beside the default each record, /v1/rates, /v1/tap, /v1/history, /v1/connections and /v1/status")
	page := f.Bool("page", false, "measure what proxy and browser take while the page is open, with 300 services; -seconds should be 5 or more")
	views := f.String("view", "", "`names` of views for -page, separated by commas (default: all): map, map paused, services, endpoints, connections, records, records paused")
	inSync := f.Bool("sync", false, "start the product with 100 to 30,000 services in each steering mode, measure start, changes and memory, and write that part of the page")
	inScale := f.Bool("scale", false, "start the product, and the kube-proxy of -kube-proxy, at sizes that users have published and larger ones, and write docs/scale.md")
	sctp := f.Bool("sctp", false, "measure the SCTP columns in a guest kernel that has SCTP, and write that part of the page")
	inside := f.Bool("inside", false, "measure the SCTP columns on this kernel: what -sctp runs in its guest")
	var sizes syncOptions
	f.StringVar(&sizes.sizes, "sync-sizes", "", "`numbers` of services of -sync and -scale, separated by commas; 5006x50: with 50 endpoints each")
	f.StringVar(&sizes.modes, "sync-modes", "", "`names` of the modes of -sync and -scale as in their tables, separated by semicolons")
	f.IntVar(&sizes.changes, "sync-changes", 50, "number of changes of each kind in -sync and -scale")
	f.DurationVar(&sizes.rollout, "rollout", time.Minute, "`time` of -scale's rollout")
	if err := f.Parse(args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return nil, nil
		}
		return nil, err
	}
	if f.NArg() > 0 {
		return nil, fmt.Errorf("unknown argument %q", f.Arg(0))
	}
	given := map[string]bool{}
	f.Visit(func(fl *flag.Flag) { given[fl.Name] = true })

	if *seconds <= 0 || o.long <= 0 || o.rounds < 1 || o.threads < 1 || o.endpoints < 1 || o.endpoints > 64 {
		return nil, errors.New("-seconds, -long, -rounds, -threads and -endpoints must be above zero, -endpoints at most 64")
	}
	if o.neighbours && o.ipv6 {
		return nil, errors.New("-neighbours has no rules for IPv6 (-6)")
	}
	if o.control == "system" {
		o.control = ""
	}
	if *quick {
		if !given["rounds"] {
			o.rounds = 2
		}
		if !given["seconds"] {
			*seconds = 0.25
		}
	}
	o.measure = time.Duration(*seconds * float64(time.Second))
	o.warmup = min(o.measure/5, 500*time.Millisecond)
	o.inside = *inside
	o.sctp = *sctp || o.inside
	var err error
	if o.peers, err = o.pickPeers(*peers, *quick); err != nil {
		return nil, err
	}
	if o.columns, err = o.pickColumns(*columns, *quick); err != nil {
		return nil, err
	}
	modes := 0
	watch := func(on bool, mode func(*bench) error) {
		if !on {
			return
		}
		modes++
		o.mode = mode
		if *peers == "" {
			o.peers = slices.DeleteFunc(peer.All(o.builds), func(p peer.Peer) bool { return p.Name != "sluice" })
		}
	}
	watch(*from != "", func(b *bench) error { return b.again(*from) })
	watch(*soak > 0, func(b *bench) error { return b.soak(*soak) })
	watch(*slow > 0, func(b *bench) error { return b.slowReader(*slow) })
	watch(*open > 0, func(b *bench) error { return b.openMany(*open) })
	watch(*lookedAt, func(b *bench) error { return b.lookAt(*look) })
	watch(*page, func(b *bench) error { return b.watchPage(*views) })
	if *inSync || *inScale {
		if *inSync && *inScale {
			modes++
		}
		modes++
		s, err := sizes.options(o.builds, *inScale)
		if err != nil {
			return nil, err
		}
		o.mode = func(b *bench) error { return b.sync(s) }
		if *inScale {
			o.mode = func(b *bench) error { return b.scale(s) }
		}
		if !given["o"] && !given["sync-sizes"] && !given["sync-modes"] {
			o.out = "docs"
		}
	}
	if *sctp {
		modes++
		o.mode = (*bench).guest
		if !given["o"] && *peers == "" && *columns == "" && !*quick {
			o.out = "docs"
		}
	}
	if modes > 1 {
		return nil, errors.New("-from, -soak, -slow-reader, -open, -looked-at, -page, -sync, -scale and -sctp are separate runs: one at a time")
	}
	if modes == 0 && !given["o"] && !*quick && *peers == "" && *columns == "" {
		o.out = "docs"
	}
	return o, nil
}

func usage(f *flag.FlagSet) {
	w := os.Stderr
	fmt.Fprint(w, "Usage: bench [flags]\n\nMeasures Sluice and other paths to a service; see docs/benchmarks.md.\n\n")
	f.SetOutput(w)
	f.PrintDefaults()
	fmt.Fprint(w, "\nPeers:\n")
	for _, p := range peer.All(peer.Builds{Sluice: "bin/sluice", Base: "sluice", HAProxy: "haproxy", KubeProxy: "kube-proxy"}) {
		fmt.Fprintf(w, "  %-16s %s%s\n", p.Name, p.About, marked(p.Extra))
	}
	fmt.Fprint(w, "\nColumns:\n")
	for _, c := range slices.Concat(allColumns(), sctpColumns()) {
		fmt.Fprintf(w, "  %-16s %s%s\n", c.id, c.about, marked(c.extra))
	}
}

func marked(extra bool) string {
	if extra {
		return " (only when named)"
	}
	return ""
}

// pickPeers finds peers by name, in the table's order; without names, all usual
// ones. A quick run leaves out the peers that have only some columns.
func (o *options) pickPeers(names string, quick bool) ([]peer.Peer, error) {
	all := peer.All(o.builds)
	if o.sctp {
		all = peer.SCTP(o.builds)
	}
	return pick(names, all, func(p peer.Peer) (string, bool) {
		return p.Name, !p.Extra && (!quick || len(p.Columns) == 0)
	}, "peer")
}

func (o *options) pickColumns(names string, quick bool) ([]column, error) {
	all := allColumns()
	if o.sctp {
		all = sctpColumns()
	}
	return pick(names, all, func(c column) (string, bool) {
		return c.id, !c.extra && (!quick || c.quick)
	}, "column")
}

func pick[T any](names string, all []T, about func(T) (name string, usual bool), what string) ([]T, error) {
	wanted := map[string]bool{}
	for name := range strings.SplitSeq(names, ",") {
		if name = strings.TrimSpace(name); name != "" {
			wanted[name] = true
		}
	}
	everyUsual := len(wanted) == 0
	var picked []T
	var known []string
	for _, item := range all {
		name, usual := about(item)
		known = append(known, name)
		if wanted[name] || everyUsual && usual {
			picked = append(picked, item)
		}
		delete(wanted, name)
	}
	for name := range wanted {
		return nil, fmt.Errorf("unknown %s %q: there are %s", what, name, strings.Join(known, ", "))
	}
	return picked, nil
}
