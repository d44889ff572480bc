package report

import (
	"errors"
	"fmt"
	"strings"
)

// Markdown writes the tables of a run: the goals, the figures (median, and the
// smallest and largest of the rounds), and the ratios.
func (d *Data) Markdown() string {
	var b strings.Builder
	d.writeEnvironment(&b)
	if d.measured("sluice") {
		d.writeGoals(&b)
	}
	d.writeFigures(&b)
	for _, base := range []string{"direct", "haproxy"} {
		d.writeRatios(&b, base)
	}
	d.writeVariants(&b)
	if len(d.Notes) > 0 {
		b.WriteString("\nNotes of this run:\n\n")
		for _, n := range d.Notes {
			fmt.Fprintf(&b, "- %s\n", n)
		}
	}
	return b.String()
}

func (d *Data) writeEnvironment(b *strings.Builder) {
	e := d.Environment
	fmt.Fprintf(b, "Measured %s on Linux %s, %s, %d x %s, IPv%d, TCP %s; %s; %d rounds, %s s for each measurement.",
		e.Date.UTC().Format("2006-01-02 15:04 MST"), e.Kernel, e.Architecture, e.CPUs, e.CPU, e.IPVersion, e.Congestion, e.Go, d.Rounds, Number(d.Seconds))
	if e.Commit != "" {
		fmt.Fprintf(b, " Commit %s.", e.Commit)
	}
	fmt.Fprintf(b, " The hypervisor took %.1f %% of the processors' time.\n", e.StealPercent)
	b.WriteString("\n| peer | what it is | version |\n|---|---|---|\n")
	for _, p := range d.Peers {
		version := p.Version
		if p.Missing != "" {
			version = "did not run: " + p.Missing
		}
		fmt.Fprintf(b, "| %s | %s | %s |\n", p.Name, cell(p.About), cell(version))
	}
}

func (d *Data) writeGoals(b *strings.Builder) {
	b.WriteString("\n### Goals\n\n| column | goal | found |\n|---|---|---|\n")
	for _, o := range d.Judge() {
		fmt.Fprintf(b, "| %s | %s | %s |\n", o.Goal.Title, o.Goal.Wanted(), o.Found())
	}
}

func (d *Data) writeFigures(b *strings.Builder) {
	b.WriteString("\n### Figures: median (smallest – largest of the rounds)\n\n")
	d.writeTable(b, d.present(), func(m Metric, peer string) string {
		s, ok := d.Spread(peer, m.ID)
		if !ok {
			return ""
		}
		if s.Min == s.Max {
			return Number(s.Median)
		}
		return fmt.Sprintf("%s (%s – %s)", Number(s.Median), Number(s.Min), Number(s.Max))
	}, func(Metric) bool { return true })
}

func (d *Data) writeRatios(b *strings.Builder, base string) {
	if !d.measured(base) {
		return
	}
	fmt.Fprintf(b, "\n### Ratios to %s: median of the rounds\n\n", base)
	d.writeTable(b, d.present(), func(m Metric, peer string) string {
		ratio, ok := d.Ratio(peer, base, m.ID)
		if !ok {
			return ""
		}
		return fmt.Sprintf("%.2f", ratio)
	}, func(m Metric) bool {
		_, ok := d.Spread(base, m.ID)
		return ok && m.Ratios
	})
}

// writeVariants compares the ways of running Sluice with the usual one.
func (d *Data) writeVariants(b *strings.Builder) {
	const base = "sluice"
	variants := d.variants()
	if len(variants) == 0 || !d.measured(base) {
		return
	}
	fmt.Fprintf(b, "\n### Ways of steering: median, and ratio to %s\n\n", base)
	among := func(m Metric) bool {
		_, ok := d.Spread(variants[0], m.ID)
		return ok && m.Ratios
	}
	d.writeTable(b, append([]string{base}, variants...), func(m Metric, peer string) string {
		s, ok := d.Spread(peer, m.ID)
		ratio, known := d.Ratio(peer, base, m.ID)
		switch {
		case !ok:
			return ""
		case peer == base || !known:
			return Number(s.Median)
		}
		return fmt.Sprintf("%s, %.2f x", Number(s.Median), ratio)
	}, among)
}

// writeTable writes a row for each metric that has a figure.
func (d *Data) writeTable(b *strings.Builder, peers []string, figure func(Metric, string) string, wanted func(Metric) bool) {
	fmt.Fprintf(b, "| | better | %s |\n|---|---|%s\n", strings.Join(peers, " | "), strings.Repeat("---:|", len(peers)))
	for _, m := range Metrics {
		if !wanted(m) {
			continue
		}
		var figures []string
		some := false
		for _, p := range peers {
			f := figure(m, p)
			some = some || f != ""
			figures = append(figures, f)
		}
		if !some {
			continue
		}
		better := "more"
		if m.Lower {
			better = "less"
		}
		fmt.Fprintf(b, "| %s | %s | %s |\n", m.Name(), better, strings.Join(figures, " | "))
	}
}

// present lists the peers that have figures, in order, without variants.
func (d *Data) present() []string { return d.having(false) }

// variants lists those.
func (d *Data) variants() []string { return d.having(true) }

func (d *Data) having(variant bool) []string {
	var names []string
	for _, p := range d.Peers {
		if p.Variant == variant && d.measured(p.Name) {
			names = append(names, p.Name)
		}
	}
	return names
}

func (d *Data) measured(peer string) bool {
	for _, s := range d.Samples {
		if s.Peer == peer {
			return true
		}
	}
	return false
}

func cell(s string) string { return strings.ReplaceAll(s, "|", "\\|") }

// The lines between which a run's tables stand in a page.
const (
	Begin = "<!-- bench:begin: written by make bench, do not edit -->"
	End   = "<!-- bench:end -->"
)

// Insert puts text between the two lines of a page, in place of what is there.
func Insert(page, text string) (string, error) {
	before, rest, ok := strings.Cut(page, Begin)
	if !ok {
		return "", errors.New("the page has no line " + Begin)
	}
	_, after, ok := strings.Cut(rest, End)
	if !ok {
		return "", errors.New("the page has no line " + End)
	}
	return before + Begin + "\n\n" + strings.TrimSpace(text) + "\n\n" + End + after, nil
}
