package scale

import (
	"fmt"
	"slices"
	"strings"
)

// goal is a target of Sluice's own, for the size of a cluster.
type goal struct {
	title string
	size  Size // of the cluster; zero for the worst of all sizes
	bound float64
	value func(Result) float64
}

var goals = []goal{
	{"10,000 services, 100,000 endpoints: start to first sync, ms", size10000, 1500, start},
	{"… memory at the end of the start, MiB", size10000, 150, memory},
	{"… memory later, MiB", size10000, 150, func(r Result) float64 { return float64(r.RSSLater >> 20) }},
	{"one endpoint changed, at any size up to 30,000 services, median, ms", Size{}, 10, change},
}

var size10000 = Size{10000, 10}

// goalModes are the modes that have goals.
var goalModes = []string{"tproxy/nftables", "sklookup"}

func start(r Result) float64   { return float64(r.Start.Milliseconds()) }
func memory(r Result) float64  { return float64(r.RSS >> 20) }
func change(r Result) float64  { return float64(r.Endpoint[0].Microseconds()) / 1000 }
func lagging(r Result) float64 { return float64(r.Rollout.Lag[0].Microseconds()) / 1000 }

// Goals compares results with the goals, as a Markdown table; empty without
// results for goals.
func Goals(results []Result) string { return judge(goals, goalModes, results) }

func judge(goals []goal, goalModes []string, results []Result) string {
	var b strings.Builder
	for _, g := range goals {
		cells := make([]string, len(goalModes))
		for i, mode := range goalModes {
			cells[i] = g.judge(mode, results)
		}
		if strings.Join(cells, "") != "" {
			fmt.Fprintf(&b, "| %s | at most %s | %s |\n", g.title, thousands(int(g.bound)), strings.Join(cells, " | "))
		}
	}
	if b.Len() == 0 {
		return ""
	}
	return "| | goal | " + strings.Join(goalModes, " | ") + " |\n|---|---|" + strings.Repeat("---|", len(goalModes)) + "\n" + b.String()
}

func (g goal) judge(mode string, results []Result) string {
	var values []float64
	for _, r := range results {
		if r.Mode != mode || g.size != (Size{}) && g.size != (Size{r.Services, r.Each}) {
			continue
		}
		if r.Error != "" {
			return "**failed**"
		}
		values = append(values, g.value(r))
	}
	if len(values) == 0 {
		return ""
	}
	worst, verdict := slices.Max(values), "met"
	if worst > g.bound {
		verdict = "**missed**"
	}
	if worst < 100 {
		return fmt.Sprintf("%.1f, %s", worst, verdict)
	}
	return thousands(int(worst)) + ", " + verdict
}

// Shortfalls writes how many goals of a table are met, and lists the rows with others.
func Shortfalls(table string) string {
	rows := strings.SplitAfter(table, "\n")
	others := slices.DeleteFunc(slices.Clone(rows), func(row string) bool { return !strings.Contains(row, "**") })
	met := strings.Count(table, ", met |")
	text := fmt.Sprintf("Of %d goals, %d are met.\n", met+strings.Count(table, "**")/2, met)
	if len(others) > 0 {
		text += "\n" + rows[0] + rows[1] + strings.Join(others, "")
	}
	return text
}
