package main

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/bench/peer"
	"github.com/sluice-proxy/sluice/test/bench/procstat"
	"github.com/sluice-proxy/sluice/test/bench/report"
)

// bench is one run of the program.
type bench struct {
	opts     options
	program  string         // this program's file
	dir      string         // for temporary files
	maxFiles int            // limit of descriptors of a process
	iperf3   bool           // a column needs its server
	now      string         // the current measurement, for notes
	window   string         // its name for load.Spec.Mark
	broken   map[string]int // failed starts by peer
	data     report.Data
	removed  sync.Once
}

func newBench(opts options) (*bench, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return nil, fmt.Errorf("limit of descriptors: %w", err)
	}
	dir, err := os.MkdirTemp("", "sluice-bench-")
	if err != nil {
		return nil, err
	}
	// nginx's workers read it as another user.
	if err := os.Chmod(dir, 0o755); err != nil {
		return nil, err
	}
	return &bench{opts: opts, program: program, dir: dir, maxFiles: int(min(limit.Max, 65536)), broken: map[string]int{}}, nil
}

// close removes the run's files. It may be called more than once.
func (b *bench) close() {
	b.removed.Do(func() {
		if b.opts.keepLogs {
			fmt.Fprintln(os.Stderr, "kept:", b.dir)
			return
		}
		_ = os.RemoveAll(b.dir)
	})
}

// note keeps a remark for readers of the figures.
func (b *bench) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if b.now != "" {
		text = b.now + ": " + text
	}
	b.data.Notes = append(b.data.Notes, text)
	fmt.Fprintln(os.Stderr, "  note:", text)
}

// compare measures all peers in all columns, round by round, and writes the
// report. Within a column the peers take turns, and each round starts with another
// peer, so that changes on the machine affect all of them.
func (b *bench) compare() error {
	peers, columns := b.prepare()
	if len(peers) == 0 || len(columns) == 0 {
		return errors.New("nothing is left to measure")
	}
	fmt.Fprintf(os.Stderr, "%d peers, %d columns, %d rounds: about %v\n",
		len(peers), len(columns), b.opts.rounds, b.estimate(peers, columns).Round(time.Minute/2))
	begin, before, err := b.start()
	if err != nil {
		return err
	}
	stages := map[string]*stage{}
	defer func() {
		for _, s := range stages {
			s.close()
		}
	}()
	for round := range b.opts.rounds {
		if err := b.round(round, peers, columns, stages); err != nil {
			return err
		}
	}
	if err := b.finish(begin, before); err != nil {
		return err
	}
	return b.write()
}

// estimate is the approximate duration of a comparison.
func (b *bench) estimate(peers []peer.Peer, columns []column) time.Duration {
	const around = 100 * time.Millisecond // per measurement: starting programs and the like
	var sum time.Duration
	for _, c := range columns {
		who, length := 0, b.opts.measure
		for _, p := range peers {
			if concerns(c, p) {
				who++
			}
		}
		if c.long {
			length = b.opts.long
		}
		sum += time.Duration(who*c.turns(b.opts.rounds)) * (b.opts.warmup + length + around)
	}
	return sum
}

// prepare leaves out peers and columns that cannot run here, and reports them.
func (b *bench) prepare() ([]peer.Peer, []column) {
	peers := slices.DeleteFunc(slices.Clone(b.opts.peers), func(p peer.Peer) bool {
		about := report.Peer{Name: p.Name, About: p.About, Version: p.Version(), Variant: p.Variant}
		err := p.Find()
		if err != nil {
			about.Missing = err.Error()
			fmt.Fprintln(os.Stderr, "left out:", err)
		}
		b.data.Peers = append(b.data.Peers, about)
		return err != nil
	})
	columns := slices.DeleteFunc(slices.Clone(b.opts.columns), func(c column) bool {
		missing := c.missingTool()
		if missing != "" {
			b.note("%s", missing)
		}
		return missing != ""
	})
	b.iperf3 = slices.ContainsFunc(columns, func(c column) bool { return c.tool == "iperf3" })
	return peers, columns
}

// busyAlready is the share of CPU time above which a note says that the machine
// had other work.
const busyAlready = 0.05

// start measures for a moment whether the machine is idle, and begins.
func (b *bench) start() (time.Time, procstat.Machine, error) {
	const look = time.Second
	before, err := procstat.ReadMachine()
	if err != nil {
		return time.Time{}, before, err
	}
	time.Sleep(look)
	machine, err := procstat.ReadMachine()
	if err != nil {
		return time.Time{}, before, err
	}
	if busy := machine.Sub(before).Busy.Seconds() / look.Seconds() / float64(runtime.NumCPU()); busy > busyAlready {
		b.note("the machine was %.0f %% busy with something else when this run began", 100*busy)
	}
	b.data.Rounds, b.data.Seconds = b.opts.rounds, b.opts.measure.Seconds()
	return time.Now(), machine, nil
}

func (b *bench) finish(begin time.Time, before procstat.Machine) error {
	machine, err := procstat.ReadMachine()
	if err != nil {
		return err
	}
	total := time.Since(begin).Seconds() * float64(runtime.NumCPU())
	b.data.Environment = environment(b.opts)
	b.data.Environment.Date = begin
	b.data.Environment.StealPercent = 100 * machine.Sub(before).Steal.Seconds() / total
	return nil
}

// concerns tells whether a column applies to a peer.
func concerns(c column, p peer.Peer) bool {
	return (len(c.only) == 0 || slices.Contains(c.only, p.Name)) &&
		(len(p.Columns) == 0 || slices.Contains(p.Columns, c.id))
}

// turns is the number of rounds in which a column is measured.
func (c column) turns(rounds int) int {
	if c.times == 0 {
		return rounds
	}
	return min(c.times, rounds)
}

// due tells whether a column is measured in a round. Its rounds are spread evenly.
func (c column) due(round, rounds int) bool {
	turns := c.turns(rounds)
	return (round+1)*turns/rounds > round*turns/rounds
}

// round measures every column for every peer once.
func (b *bench) round(round int, peers []peer.Peer, columns []column, stages map[string]*stage) error {
	for i, c := range columns {
		if !c.due(round, b.opts.rounds) {
			continue
		}
		for j := range peers {
			p := peers[(j+i+round)%len(peers)]
			if !concerns(c, p) {
				continue
			}
			b.now = fmt.Sprintf("round %d, %s, %s", round+1, c.id, p.Name)
			b.window = window(round, p.Name, c.id)
			b.measure(round, c, p, stages)
		}
	}
	b.now = ""
	return nil
}

// mostBroken is the number of failed starts after which a peer is given up.
const mostBroken = 3

// measure runs one column for one peer. A failure becomes a note, and the run
// continues on a new stage, since this one may be broken.
func (b *bench) measure(round int, c column, p peer.Peer, stages map[string]*stage) {
	drop := func() {
		if s := stages[p.Name]; s != nil {
			s.close()
			delete(stages, p.Name)
		}
	}
	if s := stages[p.Name]; s != nil && (s.spent || c.fresh && s.used) {
		drop()
	}
	s := stages[p.Name]
	if s == nil {
		if b.broken[p.Name] == mostBroken {
			return
		}
		flags := c.flags
		if p.Kernel {
			flags = nil
		}
		var err error
		if s, err = b.openStage(p, flags); err != nil {
			b.broken[p.Name]++
			b.note("%v", err)
			return
		}
		stages[p.Name] = s
	}
	s.used = true
	got, err := c.run(s)
	s.spent = c.fresh
	if err != nil {
		b.note("%v", err)
		drop()
	}
	for metric, value := range got {
		b.data.Add(round, p.Name, metric, value)
	}
	b.progress(got)
}

func (b *bench) progress(got figures) {
	var words []string
	for _, m := range report.Metrics {
		if v, ok := got[m.ID]; ok && !math.IsNaN(v) {
			_, name, _ := strings.Cut(m.ID, ".")
			words = append(words, fmt.Sprintf("%s %s %s", name, report.Number(v), m.Unit))
		}
	}
	fmt.Fprintf(os.Stderr, "%s: %s\n", b.now, strings.Join(words, ", "))
}

// again writes the report of an earlier run again.
func (b *bench) again(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	d, err := report.Parse(text)
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	b.data = *d
	return b.write()
}

// figuresFile has the figures of all rounds.
const figuresFile = "benchmarks.json"

// write prints the report. With an output directory, it writes the tables into the
// page there, and the chart and the figures beside it.
func (b *bench) write() error {
	if b.opts.out == "" {
		fmt.Print(b.data.Markdown())
		return nil
	}
	fmt.Print(b.data.Summary())
	if err := os.MkdirAll(b.opts.out, 0o755); err != nil {
		return err
	}
	text, err := b.data.JSON()
	if err != nil {
		return err
	}
	for name, content := range map[string]string{figuresFile: string(text), "benchmarks.svg": b.data.Chart()} {
		if err := os.WriteFile(filepath.Join(b.opts.out, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	if err := b.insert("benchmarks.md", map[string]string{"bench": b.data.Shortfalls(), "bench-costs": b.data.Costs(), "bench-figures": b.data.Page()}); err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "written: benchmarks.md, benchmarks.json and benchmarks.svg in", b.opts.out)
	return nil
}

// insert puts texts into the generated parts of the page, by name. A new page
// consists of these parts only.
func (b *bench) insert(name string, parts map[string]string) error {
	file := filepath.Join(b.opts.out, name)
	text, err := os.ReadFile(file)
	page := string(text)
	if errors.Is(err, os.ErrNotExist) {
		page, err = "# Benchmarks\n", nil
		for _, name := range slices.Sorted(maps.Keys(parts)) {
			page += "\n<!-- " + name + ":begin -->\n<!-- " + name + ":end -->\n"
		}
	}
	if err != nil {
		return err
	}
	for name, text := range parts {
		if page, err = report.Insert(page, name, text); err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	return os.WriteFile(file, []byte(page), 0o644)
}

// environment describes the machine.
func environment(opts options) report.Environment {
	e := report.Environment{
		Kernel: "unknown", Architecture: runtime.GOARCH, CPU: "unknown processor",
		CPUs: runtime.NumCPU(), Go: runtime.Version(), IPVersion: 4,
	}
	if opts.ipv6 {
		e.IPVersion = 6
	}
	var name unix.Utsname
	if err := unix.Uname(&name); err == nil {
		e.Kernel = unix.ByteSliceToString(name.Release[:])
	}
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(info)) {
			key, value, ok := strings.Cut(line, ":")
			if ok && strings.TrimSpace(key) == "model name" {
				e.CPU = strings.TrimSpace(value)
				break
			}
		}
	}
	e.Congestion = opts.control
	if name, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control"); err == nil && e.Congestion == "" {
		e.Congestion = strings.TrimSpace(string(name))
	}
	if out, err := exec.Command("git", "describe", "--always", "--dirty").Output(); err == nil {
		e.Commit = strings.TrimSpace(string(out))
	}
	return e
}
