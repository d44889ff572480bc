package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/bench/load"
	"github.com/sluice-proxy/sluice/test/bench/report"
	"github.com/sluice-proxy/sluice/test/vm"
)

// Many kernels have no SCTP. So the SCTP columns are measured in a guest of test/vm: this
// program runs itself there with -inside.

const (
	// idleAssociations is the number of associations in the column sctp-idle.
	idleAssociations = 1000
	// wideWindow is SO_RCVBUF in the column sctp-bulk-wide, in bytes.
	wideWindow = 8 << 20
	// guestLimit bounds a run in the guest.
	guestLimit = 15 * time.Minute
)

// guestModules are loaded in the guest: SCTP, DNAT by iptables, IPVS, and the links.
var guestModules = []string{"veth", "ipv6", "sctp", "hmac", "iptable_nat", "xt_nat", "xt_sctp", "ip_vs", "ip_vs_rr"}

// sctpColumns lists the columns in the order in which they run.
func sctpColumns() []column {
	return []column{
		{id: "sctp-idle", about: "SCTP: memory and descriptors for each of 1,000 idle associations", fresh: true, times: 3, run: idle("sctp-idle", idleAssociations, "sctp")},
		{id: "sctp-rr1", about: "SCTP: 100 bytes there and back, 1 association", quick: true, run: associations("sctp-rr1", 1, load.SCTPMessageSize)},
		{id: "sctp-rr16", about: "SCTP: the same, 16 associations", quick: true, run: associations("sctp-rr16", 16, load.SCTPMessageSize)},
		{id: "sctp-rr16k", about: "SCTP: 16 KiB there and back, 1 association", extra: true, run: associations("sctp-rr16k", 1, load.SCTPBulkSize)},
		{id: "sctp-bulk", about: "SCTP: messages of 16 KiB from the server, 1 association", quick: true, run: messages("sctp-bulk", 0)},
		{id: "sctp-bulk-wide", about: "SCTP: the same, with a window of the client that does not close", extra: true, run: messages("sctp-bulk-wide", wideWindow)},
	}
}

func associations(id string, n, size int) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		return s.figures(load.Spec{Kind: load.SCTPEcho, Clients: n, Size: size}, func(r *load.Result) figures {
			return figures{
				id + ".rate":     r.Rate,
				id + ".p50":      microseconds(r.P50),
				id + ".p99":      microseconds(r.P99),
				id + ".cpu":      per100k(r.Relay, r.Count),
				id + countSuffix: float64(r.Count),
			}
		})
	}
}

// messages measures a client that reads messages without end, with SO_RCVBUF of a size;
// 0 for the kernel's. When the window closes, the kernel drops the packet that probes it,
// and then delivers messages in parts, each of which wakes the client: see
// docs/benchmarks.md.
func messages(id string, window int) func(*stage) (figures, error) {
	return func(s *stage) (figures, error) {
		return s.figures(load.Spec{Kind: load.SCTPDownload, Clients: 1, Window: window}, func(r *load.Result) figures {
			return figures{
				id + ".rate":     r.ByteRate / load.SCTPBulkSize,
				id + ".cpu":      per100k(r.Relay, r.Bytes/load.SCTPBulkSize),
				id + ".reads":    float64(r.Reads) / max(1, float64(r.Bytes)/load.SCTPBulkSize),
				id + countSuffix: float64(r.Bytes) / load.SCTPBulkSize,
			}
		})
	}
}

// settle binds this thread, and what it starts, to one CPU, and has this process run
// before all others. A guest has one CPU, and consists of processes that wake each other at each of
// its system calls: between CPUs, and behind other work, these wake-ups would be measured.
func settle() error {
	runtime.LockOSThread()
	var all, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		return fmt.Errorf("CPUs: %w", err)
	}
	for cpu := range len(all) * 64 {
		if all.IsSet(cpu) {
			one.Zero()
			one.Set(cpu) // the last one
		}
	}
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		return fmt.Errorf("bind to a CPU: %w", err)
	}
	threads, err := os.ReadDir("/proc/self/task") // later ones inherit it
	for _, thread := range threads {
		tid, _ := strconv.Atoi(thread.Name())
		err = errors.Join(err, unix.SchedSetAttr(tid, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_RR, Priority: 1}, 0))
	}
	if err != nil {
		return fmt.Errorf("priority: %w", err)
	}
	return nil
}

// guest measures in the guest, and writes the report here.
func (b *bench) guest() error {
	sluice, err := filepath.Abs(b.opts.builds.Sluice)
	if err != nil {
		return err
	}
	command := []string{b.program, "-inside", "-sluice", sluice, "-o", b.dir,
		"-rounds", fmt.Sprint(turnsPerRound * b.opts.rounds), "-seconds", fmt.Sprint(b.opts.measure.Seconds()),
		"-columns", b.opts.columnNames(), "-peers", b.opts.peerNames()}
	visible := []string{filepath.Dir(sluice)}
	if b.opts.builds.Base != "" {
		base, err := filepath.Abs(b.opts.builds.Base)
		if err != nil {
			return err
		}
		command = append(command, "-base", base)
		visible = append(visible, filepath.Dir(base))
	}
	var cpu hostCPU
	if err := settle(); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), guestLimit)
	defer cancel()
	status, err := vm.Run(ctx, vm.Config{
		Init: b.program, Command: command, Dir: b.dir, Modules: guestModules,
		Visible: visible, Writable: []string{b.dir}, Output: &cpu, Started: cpu.watch,
	})
	if err != nil {
		return err
	}
	if status != 0 {
		return errors.New("the run in the guest failed")
	}
	text, err := os.ReadFile(filepath.Join(b.dir, figuresFile))
	if err != nil {
		return err
	}
	d, err := report.Parse(text)
	if err != nil {
		return fmt.Errorf("the guest's figures: %w", err)
	}
	cpu.addTo(d)
	here := environment(b.opts) // the guest knows neither
	d.Environment.CPU, d.Environment.Commit = here.CPU, here.Commit
	fmt.Print(d.Markdown())
	if b.opts.out == "" {
		return nil
	}
	if text, err = d.JSON(); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(b.opts.out, "benchmarks-sctp.json"), text, 0o644); err != nil {
		return err
	}
	return b.insert("benchmarks.md", map[string]string{"bench-sctp": d.Shortfalls(), "bench-sctp-figures": d.Page()})
}

func (o *options) columnNames() string {
	var names []string
	for _, c := range o.columns {
		names = append(names, c.id)
	}
	return strings.Join(names, ",")
}

func (o *options) peerNames() string {
	var names []string
	for _, p := range o.peers {
		names = append(names, p.Name)
	}
	return strings.Join(names, ",")
}
