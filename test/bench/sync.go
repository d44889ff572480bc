package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/sluice-proxy/sluice/test/bench/report"
	"github.com/sluice-proxy/sluice/test/bench/scale"
)

// syncOptions are the flags of -sync.
type syncOptions struct {
	sizes, modes string
	changes      int
}

// parse evaluates the flags.
func (o syncOptions) parse(binary string) (scale.Options, error) {
	s := scale.Options{Binary: binary, Changes: o.changes, Log: os.Stderr, Sizes: scale.Sizes, Modes: scale.Modes()}
	if o.changes < 1 || o.changes > 1000 {
		return s, fmt.Errorf("-sync-changes %d: want 1 to 1000", o.changes)
	}
	if o.sizes != "" {
		s.Sizes = nil
		for text := range strings.SplitSeq(o.sizes, ",") {
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 || n > 60000 {
				return s, fmt.Errorf("-sync-sizes: %q is not a number of services, 1 to 60000", text)
			}
			s.Sizes = append(s.Sizes, n)
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

// sync measures the effect of a cluster's size, prints the table, and with an
// output directory writes it with the chart into the page.
func (b *bench) sync(o scale.Options) error {
	begin, before, err := b.start()
	if err != nil {
		return err
	}
	results, err := scale.Run(o)
	if err != nil {
		return err
	}
	if err := b.finish(begin, before); err != nil {
		return err
	}
	e := b.data.Environment
	text := fmt.Sprintf("Measured %s on Linux %s, %d x %s; %s. The hypervisor took %s %% of the processors' time.\n",
		e.Date.UTC().Format("2006-01-02 15:04 UTC"), e.Kernel, e.CPUs, e.CPU, e.Go, report.Number(e.StealPercent))
	for _, note := range b.data.Notes {
		text += "\nNote: " + note + ".\n"
	}
	goals := scale.Goals(results)
	text += "\n" + scale.Table(results)
	fmt.Print(goals, "\n", text)
	if b.opts.out == "" {
		return nil
	}
	if err := b.insert(map[string]string{"bench-sync": goals, "bench-sync-figures": text}); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(b.opts.out, "scale.svg"), []byte(scale.Chart(results)), 0o644)
}
