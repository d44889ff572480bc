package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/peer"
	"github.com/sluice-proxy/sluice/test/bench/report"
	"github.com/sluice-proxy/sluice/test/bench/scale"
)

// syncOptions are the flags of -sync and -scale.
type syncOptions struct {
	sizes, modes string
	changes      int
	rollout      time.Duration
}

// options returns what to measure: -sync's clusters and modes, or -scale's.
func (o syncOptions) options(builds peer.Builds, public bool) (scale.Options, error) {
	s := scale.Options{Binary: builds.Sluice, Changes: o.changes, Log: os.Stderr, Sizes: scale.Sizes, Modes: scale.Modes()}
	if public {
		s.Sizes, s.Modes, s.Rate, s.Length = scale.PublicSizes, scale.PublicModes(builds.KubeProxy), scale.PublicRate, o.rollout
	}
	if o.changes < 1 || o.changes > 1000 {
		return s, fmt.Errorf("-sync-changes %d: want 1 to 1000", o.changes)
	}
	if o.sizes != "" {
		s.Sizes = nil
		for text := range strings.SplitSeq(o.sizes, ",") {
			size, err := parseSize(text)
			if err != nil {
				return s, err
			}
			s.Sizes = append(s.Sizes, size)
		}
	}
	if o.modes != "" {
		wanted := strings.Split(o.modes, ";")
		s.Modes = slices.DeleteFunc(s.Modes, func(m scale.Mode) bool { return !slices.Contains(wanted, m.Name) })
		if len(s.Modes) != len(wanted) {
			return s, fmt.Errorf("-sync-modes %q: unknown mode", o.modes)
		}
	}
	return s, nil
}

// parseSize reads a number of services, or 5006x50 for 50 endpoints of each. An EndpointSlice has
// 100 endpoints at most.
func parseSize(text string) (size scale.Size, err error) {
	services, each, given := strings.Cut(text, "x")
	if size.Services, err = strconv.Atoi(services); err == nil {
		size.Each = min(10, max(1, 100_000/max(size.Services, 1)))
		if given {
			size.Each, err = strconv.Atoi(each)
		}
	}
	if err != nil || size.Services < 1 || size.Services > 60000 || size.Each < 1 || size.Each > 100 {
		return size, fmt.Errorf("-sync-sizes: %q is not a number of services, 1 to 60000, or 5006x50 with so many endpoints each, 1 to 100", text)
	}
	return size, nil
}

// sync measures the effect of a cluster's size, prints the tables, and with an
// output directory writes them with the chart into the page.
func (b *bench) sync(o scale.Options) error {
	results, about, err := b.measureSizes(o)
	if err != nil {
		return err
	}
	goals, text := scale.Goals(results), about+"\n"+scale.Table(results)
	fmt.Print(goals, "\n", text)
	if b.opts.out == "" {
		return nil
	}
	if err := b.insert("scale.md", map[string]string{"bench-sync": scale.Shortfalls(goals), "bench-sync-figures": about + "\n" + scale.Table(scale.Largest(results))}); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.opts.out, "scale.svg"), []byte(scale.Chart(results)), 0o644)
}

// scale measures the sizes that users have published, and larger ones, beside kube-proxy.
func (b *bench) scale(o scale.Options) error {
	results, about, err := b.measureSizes(o)
	if err != nil {
		return err
	}
	goals, text := scale.PublicGoals(results), about+"\n"+scale.PublicTable(results)
	fmt.Print(goals, "\n", text)
	if b.opts.out == "" {
		return nil
	}
	return b.insert("scale.md", map[string]string{"bench-scale": scale.Shortfalls(goals), "bench-scale-figures": text})
}

// measureSizes returns the results, and where and when they were measured.
func (b *bench) measureSizes(o scale.Options) ([]scale.Result, string, error) {
	begin, before, err := b.start()
	if err != nil {
		return nil, "", err
	}
	results, err := scale.Run(o)
	if err != nil {
		return nil, "", err
	}
	if err := b.finish(begin, before); err != nil {
		return nil, "", err
	}
	e := b.data.Environment
	text := fmt.Sprintf("Measured %s on Linux %s, %d x %s; %s. The hypervisor took %s %% of the processors' time.\n",
		e.Date.UTC().Format("2006-01-02 15:04 UTC"), e.Kernel, e.CPUs, e.CPU, e.Go, report.Number(e.StealPercent))
	for _, note := range b.data.Notes {
		text += "\nNote: " + note + ".\n"
	}
	return results, text, nil
}
