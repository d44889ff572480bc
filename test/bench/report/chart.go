package report

import (
	"encoding/xml"
	"fmt"
	"slices"
	"strings"
)

// The chart's measures, in pixels.
const (
	panelWidth  = 400
	labelWidth  = 104
	figureWidth = 76
	barHeight   = 16
	barGap      = 5
	panelHead   = 38
	panelGap    = 22
	margin      = 18
)

var colours = map[string]string{
	"direct": "#9aa5b1", "dnat": "#c3cbd4", "haproxy": "#4f7cac", "haproxy-splice": "#7ba3cc", "nginx": "#5b9f8f", "goproxy": "#c9a24b",
	"sluice": "#d1495b", "sluice-kernel": "#8f2d56",
}

// variantColour is for Sluice with other flags, or another build of it.
const variantColour = "#e59aa4"

// Chart draws a panel of bars for each metric that has figures and belongs to the
// chart. It is an SVG document; empty if there is nothing to draw.
func (d *Data) Chart() string {
	var panels []panel
	for _, m := range Metrics {
		if !m.Chart {
			continue
		}
		if p := d.panel(m); p.bars > 0 {
			panels = append(panels, p)
		}
	}
	if len(panels) == 0 {
		return ""
	}
	width, y := 2*margin+2*panelWidth+panelGap, margin
	var b strings.Builder
	for row := range slices.Chunk(panels, 2) {
		bars := 0
		for i, p := range row {
			fmt.Fprintf(&b, `<g transform="translate(%d %d)">`+"\n%s</g>\n", margin+i*(panelWidth+panelGap), y, p.svg)
			bars = max(bars, p.bars)
		}
		y += panelHead + bars*(barHeight+barGap) + panelGap
	}
	height := y - panelGap + margin
	return fmt.Sprintf(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %d %d" width="%d" height="%d" font-family="system-ui, sans-serif" font-size="12">`+"\n", width, height, width, height) +
		"<title>Sluice beside other ways to a service</title>\n" +
		fmt.Sprintf(`<rect width="%d" height="%d" rx="6" fill="#ffffff"/>`+"\n", width, height) + b.String() + "</svg>\n"
}

// panel is one metric's part of the chart.
type panel struct {
	svg  string
	bars int
}

// panel draws one metric: a bar for the median of each peer that has figures, and
// a thin line between its quartiles.
func (d *Data) panel(m Metric) (drawn panel) {
	longest := 0.0
	var peers []string
	for _, p := range d.having(false) {
		if s, ok := d.Spread(p, m.ID); ok {
			peers = append(peers, p)
			longest = max(longest, s.High)
		}
	}
	if longest <= 0 {
		return drawn
	}
	better := "more is better"
	if m.Lower {
		better = "less is better"
	}
	var b strings.Builder
	fmt.Fprintf(&b, `<text y="13" font-weight="600" fill="#1f2933">%s</text>`+"\n", escape(m.full()))
	fmt.Fprintf(&b, `<text y="29" font-size="11" fill="#616e7c">%s</text>`+"\n", escape(strings.TrimPrefix(m.Unit+", "+better, ", ")))
	scale := float64(panelWidth-labelWidth-figureWidth) / longest
	for i, p := range peers {
		y := panelHead + i*(barHeight+barGap)
		base := y + barHeight - 4
		fmt.Fprintf(&b, `<text x="%d" y="%d" text-anchor="end" fill="#1f2933">%s</text>`+"\n", labelWidth-8, base, escape(p))
		s, _ := d.Spread(p, m.ID)
		fmt.Fprintf(&b, `<rect x="%d" y="%d" width="%.1f" height="%d" rx="2" fill="%s"/>`+"\n",
			labelWidth, y, max(s.Median, 0)*scale, barHeight, colour(p))
		fmt.Fprintf(&b, `<path d="M%.1f %d H%.1f" stroke="#1f2933" stroke-opacity=".55"/>`+"\n",
			labelWidth+max(s.Low, 0)*scale, y+barHeight/2, labelWidth+max(s.High, 0)*scale)
		fmt.Fprintf(&b, `<text x="%.1f" y="%d" fill="#1f2933">%s</text>`+"\n", labelWidth+max(s.High, 0)*scale+6, base, Number(s.Median))
	}
	return panel{b.String(), len(peers)}
}

func colour(peer string) string {
	if c, ok := colours[peer]; ok {
		return c
	}
	return variantColour
}

func escape(s string) string {
	var b strings.Builder
	// Writing to a Builder never fails.
	_ = xml.EscapeText(&b, []byte(s))
	return b.String()
}
