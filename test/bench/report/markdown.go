package report

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strings"
)

// Markdown is the whole report of a run.
func (d *Data) Markdown() string {
	return d.Summary() + "\n" + d.figures() + d.variants() + d.Ratios()
}

// Summary writes where and how the run was made, and the goals with the results.
func (d *Data) Summary() string {
	var b strings.Builder
	d.writeEnvironment(&b)
	outcomes := d.Judge()
	if len(outcomes) == 0 {
		return b.String()
	}
	b.WriteString("\n| column | goal | found | |\n|---|---|---|---|\n")
	for _, o := range outcomes {
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", o.Goal.Title, o.Goal.Wanted(), o.Words(), o.Verdict.markdown())
	}
	return b.String()
}

func (d *Data) figures() string {
	var b strings.Builder
	d.writeTable(&b, "figures: median of the rounds, ± half the interquartile range", d.having(false), func(m Metric, peer string) string {
		s, ok := d.Spread(peer, m.ID)
		return s.words(ok)
	})
	d.writeNotes(&b)
	return b.String()
}

func (d *Data) writeNotes(b *strings.Builder) {
	if len(d.Notes) == 0 {
		return
	}
	b.WriteString("Notes of this run:\n\n")
	for _, n := range d.Notes {
		fmt.Fprintf(b, "- %s\n", n)
	}
	b.WriteString("\n")
}

// variants writes the figures of the variants of Sluice, and their ratios to the default.
func (d *Data) variants() string {
	var b strings.Builder
	if d.measured(subject) {
		d.writeTable(&b, "variants of Sluice: median, and ratio to the default", d.having(true), func(m Metric, peer string) string {
			s, ok := d.Spread(peer, m.ID)
			ratio, known := d.Ratio(peer, subject, m.ID)
			if !ok || !known || !m.Ratios {
				return ""
			}
			return fmt.Sprintf("%s, %.2f x", Number(s.Median), ratio.Median)
		})
	}
	return b.String()
}

// Ratios writes the ratios of Sluice's data paths to each peer.
func (d *Data) Ratios() string {
	var b strings.Builder
	peers := d.having(false)
	d.writeRatios(&b, "Sluice", subject, peers)
	d.writeRatios(&b, "Sluice's kernel flows", kernelFlows, peers)
	return b.String()
}

// The peers that the report is about: the product's data paths.
const (
	subject     = "sluice"
	kernelFlows = "sluice-kernel"
)

// writeRatios writes the ratios of one peer to all others.
func (d *Data) writeRatios(b *strings.Builder, title, subject string, peers []string) {
	if !d.measured(subject) {
		return
	}
	others := slices.DeleteFunc(slices.Clone(peers), func(p string) bool { return p == subject })
	d.writeTable(b, "ratio of "+title+" to each peer: median of the rounds", others, func(m Metric, peer string) string {
		ratio, ok := d.Ratio(subject, peer, m.ID)
		if !ok || !m.Ratios {
			return ""
		}
		return fmt.Sprintf("%.2f", ratio.Median)
	})
}

func (s Spread) words(ok bool) string {
	if !ok {
		return ""
	}
	if around := (s.High - s.Low) / 2 / math.Abs(s.Median); around >= 0.01 && !math.IsInf(around, 0) {
		return fmt.Sprintf("%s ±%.0f%%", Number(s.Median), 100*around)
	}
	return Number(s.Median)
}

// number finds the version in a program's version output.
var number = regexp.MustCompile(`[0-9]+(\.[0-9]+)+\S*`)

func (d *Data) writeEnvironment(b *strings.Builder) {
	e := d.Environment
	fmt.Fprintf(b, "Measured %s on Linux %s, %s, %d x %s, IPv%d, TCP %s, %s",
		e.Date.UTC().Format("2006-01-02 15:04 MST"), e.Kernel, e.Architecture, e.CPUs, e.CPU, e.IPVersion, e.Congestion, e.Go)
	var missing []string
	said := map[string]bool{}
	for _, p := range d.Peers {
		if version := number.FindString(p.Version); version != "" && !said[version] && !strings.HasPrefix(p.Version, subject) {
			fmt.Fprintf(b, ", %s %s", p.Name, version)
			said[version] = true
		}
		if p.Missing != "" {
			missing = append(missing, fmt.Sprintf("%s did not run: %s", p.Name, p.Missing))
		}
	}
	rounds := "1 round"
	if d.Rounds > 1 {
		rounds = fmt.Sprint(d.Rounds, " rounds")
	}
	fmt.Fprintf(b, "; %s of %g s.", rounds, d.Seconds)
	if e.Commit != "" {
		fmt.Fprintf(b, " Commit %s.", e.Commit)
	}
	fmt.Fprintf(b, " The hypervisor took %.1f %% of the processors' time.\n", e.StealPercent)
	for _, m := range missing {
		fmt.Fprintf(b, "\n%s\n", m)
	}
}

// writeTable writes a row for each metric that has figures, in one table each for
// TCP, UDP and SCTP, with the peers that have figures there.
func (d *Data) writeTable(b *strings.Builder, title string, peers []string, figure func(Metric, string) string) {
	for _, protocol := range []string{"TCP", "UDP", "SCTP"} {
		rows := map[string][]string{} // by peer, a cell for each metric
		var metrics []Metric
		for _, m := range Metrics {
			if m.protocol() != protocol {
				continue
			}
			var cells []string
			for _, p := range peers {
				cells = append(cells, figure(m, p))
			}
			if strings.Join(cells, "") == "" {
				continue
			}
			metrics = append(metrics, m)
			for i, p := range peers {
				rows[p] = append(rows[p], cells[i])
			}
		}
		some := slices.DeleteFunc(slices.Clone(peers), func(p string) bool { return strings.Join(rows[p], "") == "" })
		if len(some) == 0 {
			continue
		}
		fmt.Fprintf(b, "**%s, %s**\n\n| | %s |\n|---|%s\n", protocol, title, strings.Join(some, " | "), strings.Repeat("---:|", len(some)))
		below := ""
		for i, m := range metrics {
			fmt.Fprintf(b, "| %s |", m.name(below))
			below = cmp.Or(m.parent(), m.Title)
			for _, p := range some {
				fmt.Fprintf(b, " %s |", rows[p][i])
			}
			b.WriteString("\n")
		}
		b.WriteString("\n")
	}
}

// having lists the peers that have figures, in order: the variants, or the others.
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
	return slices.ContainsFunc(d.Samples, func(s Sample) bool { return s.Peer == peer })
}

// Insert replaces the content of one of a page's generated parts, which stands
// between the lines "<!-- name:begin … -->" and "<!-- name:end -->".
func Insert(page, name, text string) (string, error) {
	begin, end := "<!-- "+name+":begin", "<!-- "+name+":end -->"
	before, rest, ok := strings.Cut(page, begin)
	line, rest, ended := strings.Cut(rest, "\n")
	_, after, closed := strings.Cut(rest, end)
	if !ok || !ended || !closed {
		return "", errors.New("the page has no lines " + begin + " and " + end)
	}
	return before + begin + line + "\n\n" + strings.TrimSpace(text) + "\n\n" + end + after, nil
}
