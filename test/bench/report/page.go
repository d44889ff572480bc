package report

import (
	"fmt"
	"strings"
)

// Page is what a page has of a run: where it was made, and a row for each peer with the medians of the
// metrics that have a column there.
func (d *Data) Page() string {
	var b strings.Builder
	d.writeEnvironment(&b)
	head, rule := "\n| |", "\n|---|"
	var columns []Metric
	for _, m := range Metrics {
		if m.Page != "" && d.has(m.ID) {
			columns = append(columns, m)
			head, rule = head+" "+m.withUnit(m.Page)+" |", rule+"---:|"
		}
	}
	b.WriteString(head + rule + "\n")
	for _, peer := range d.having(false) {
		b.WriteString("| " + peer + " |")
		for _, m := range columns {
			if s, ok := d.Spread(peer, m.ID); ok {
				b.WriteString(" " + Number(s.Median))
			}
			b.WriteString(" |")
		}
		b.WriteString("\n")
	}
	b.WriteString("\n")
	d.writeNotes(&b)
	return b.String()
}

// Shortfalls writes how many goals are met and how many are unclear, and lists the others.
func (d *Data) Shortfalls() string {
	var b strings.Builder
	titles, met, unclear, all := make(map[string]string), 0, 0, d.Judge()
	for _, m := range Metrics {
		titles[m.ID] = m.full()
	}
	for _, o := range all {
		switch o.Verdict {
		case Met:
			met++
			continue
		case Unclear:
			unclear++
			continue
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", o.Goal.Peer, titles[o.Goal.Metric], o.Goal.Wanted(), o.Words(), o.Verdict.markdown())
	}
	text := fmt.Sprintf("Of %d goals, %d are met and %d unclear.\n", len(all), met, unclear)
	if b.Len() > 0 {
		text += "\n| | column | goal | found | |\n|---|---|---|---|---|\n" + b.String()
	}
	return text
}
