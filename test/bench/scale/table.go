package scale

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// Table returns results as a Markdown table.
func Table(results []Result) string {
	var b strings.Builder
	b.WriteString("| services | steering | start to first sync [ms] | CPU of the start [s] | RSS at the end of the start [MiB] | RSS later [MiB] | one endpoint changed [ms] | one service added [ms] | CPU of a change [ms] |\n")
	b.WriteString("|---:|---|---:|---:|---:|---:|---:|---:|---:|\n")
	for _, r := range results {
		if r.Error != "" {
			reason, _, _ := strings.Cut(r.Error, "\n")
			fmt.Fprintf(&b, "| %s | %s | %s | | | | | | |\n", thousands(r.Services), r.Mode, strings.ReplaceAll(reason, "|", "/"))
			continue
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %.2f | %d | %d | %s (%s) | %s (%s) | %.1f |\n",
			thousands(r.Services), r.Mode, thousands(int(r.Start.Milliseconds())), r.CPU.Seconds(), r.RSS>>20, r.RSSLater>>20,
			ms(r.Endpoint[0]), ms(r.Endpoint[1]), ms(r.Service[0]), ms(r.Service[1]), float64(r.CPUChange.Microseconds())/1000/float64(r.Changes))
	}
	return b.String()
}

// Largest returns the results of the largest size of each mode.
func Largest(results []Result) (largest []Result) {
	for i, r := range results {
		if !slices.ContainsFunc(results[i+1:], func(o Result) bool { return o.Mode == r.Mode }) {
			largest = append(largest, r)
		}
	}
	return largest
}

func ms(d time.Duration) string {
	return fmt.Sprintf("%.1f", float64(d.Microseconds())/1000)
}

func thousands(n int) string {
	if n < 1000 {
		return fmt.Sprint(n)
	}
	return thousands(n/1000) + fmt.Sprintf(",%03d", n%1000)
}

// Chart draws the times by size, both axes logarithmic, as an SVG: solid lines are
// starts, broken ones one changed endpoint.
func Chart(results []Result) string {
	const width, height, left, bottom, top, right = 760, 400, 70, 50, 20, 230
	colours := []string{"#1b6ca8", "#c0392b", "#2e8b57", "#8e44ad", "#b8860b", "#555555"}
	lines := map[string][]Result{}
	var modes []string
	low, high, least, most := math.Inf(1), 1.0, math.Inf(1), 1.0
	for _, r := range results {
		if r.Error != "" {
			continue
		}
		if lines[r.Mode] == nil {
			modes = append(modes, r.Mode)
		}
		lines[r.Mode] = append(lines[r.Mode], r)
		least, most = min(least, float64(r.Services)), max(most, float64(r.Services))
		low, high = min(low, r.Endpoint[0].Seconds()*1000), max(high, r.Start.Seconds()*1000)
	}
	low, high = math.Pow(10, math.Floor(math.Log10(low))), math.Pow(10, math.Ceil(math.Log10(high)))
	x := func(n int) float64 {
		return left + (width-left-right)*math.Log(float64(n)/least)/max(math.Log(most/least), 1e-9)
	}
	y := func(ms float64) float64 {
		return height - bottom - (height-bottom-top)*math.Log(ms/low)/math.Log(high/low)
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" font-family="sans-serif" font-size="12">`+"\n", width, height)
	fmt.Fprintf(&b, `<rect width="%d" height="%d" fill="white"/>`+"\n", width, height)
	for v := low; v <= high*1.001; v *= 10 {
		fmt.Fprintf(&b, `<line x1="%d" y1="%.0f" x2="%d" y2="%.0f" stroke="#ddd"/><text x="%d" y="%.0f" text-anchor="end">%g ms</text>`+"\n", left, y(v), width-right, y(v), left-6, y(v)+4, v)
	}
	for i, mode := range modes {
		colour := colours[i%len(colours)]
		var start, change []string
		for _, r := range lines[mode] {
			start = append(start, fmt.Sprintf("%.1f,%.1f", x(r.Services), y(r.Start.Seconds()*1000)))
			change = append(change, fmt.Sprintf("%.1f,%.1f", x(r.Services), y(r.Endpoint[0].Seconds()*1000)))
			if i == 0 {
				fmt.Fprintf(&b, `<text x="%.0f" y="%d" text-anchor="middle">%s</text>`+"\n", x(r.Services), height-bottom+18, thousands(r.Services))
			}
		}
		fmt.Fprintf(&b, `<polyline fill="none" stroke="%s" stroke-width="2" points="%s"/>`+"\n", colour, strings.Join(start, " "))
		fmt.Fprintf(&b, `<polyline fill="none" stroke="%s" stroke-width="2" stroke-dasharray="5 4" points="%s"/>`+"\n", colour, strings.Join(change, " "))
		fmt.Fprintf(&b, `<text x="%d" y="%d" fill="%s">%s</text>`+"\n", width-right+12, top+20+20*i, colour, mode)
	}
	fmt.Fprintf(&b, `<text x="%d" y="%d">services</text><text x="%d" y="%d">solid: start to first sync</text><text x="%d" y="%d">broken: one endpoint changed</text>`+"\n",
		left, height-10, width-right+12, height-bottom-20, width-right+12, height-bottom)
	b.WriteString("</svg>\n")
	return b.String()
}
