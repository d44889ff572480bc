package top

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sluice-proxy/sluice/internal/amount"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
)

const (
	bold    = "\x1b[1m"
	reverse = "\x1b[7m"
	plain   = "\x1b[0m"
)

// column is a column of numbers.
type column struct {
	name  string
	width int
	value func(*api.Rates) string
	// rank orders columns by importance: a narrow terminal shows those of low rank.
	rank int
	sort string // the order that is by this column
}

var columns = []column{
	{"OPEN", 7, func(r *api.Rates) string { return strconv.Itoa(r.Open) }, 0, "open"},
	{"NEW/s", 8, func(r *api.Rates) string { return rate(r.Opened) }, 0, "opened"},
	{"FAIL/s", 8, func(r *api.Rates) string { return rate(r.Failed) }, 1, "failed"},
	{"RETRY/s", 8, func(r *api.Rates) string { return rate(r.FailedAttempts) }, 6, ""},
	{"UP/s", 10, func(r *api.Rates) string { return amount.Bytes(uint64(r.BytesFromClient)) }, 4, "received"},
	{"DOWN/s", 10, func(r *api.Rates) string { return amount.Bytes(uint64(r.BytesFromEndpoint)) }, 2, "bytes"},
	{"CONNECT p50", 12, func(r *api.Rates) string { return duration(r.ConnectP50US) }, 5, ""},
	{"p99", 8, func(r *api.Rates) string { return duration(r.ConnectP99US) }, 6, "connect"},
	{"BYTE p50", 10, func(r *api.Rates) string { return duration(r.FirstP50US) }, 7, ""},
	{"BYTE p99", 10, func(r *api.Rates) string { return duration(r.FirstP99US) }, 3, "first"},
	{"LAST p50", 10, func(r *api.Rates) string { return duration(r.DurationP50US) }, 9, ""},
	{"LAST p99", 10, func(r *api.Rates) string { return duration(r.DurationP99US) }, 8, "duration"},
}

// fitting returns the columns that leave so much of a width to names, and what they
// leave. The column of the order is always among them.
func fitting(width, name int, sort string) (shown []column, wide int) {
	shown, wide = slices.Clone(columns), width
	for _, c := range shown {
		wide -= c.width
	}
	for wide < name {
		last := -1
		for i, c := range shown {
			if c.rank > 0 && c.sort != sort && (last < 0 || c.rank > shown[last].rank) {
				last = i
			}
		}
		if last < 0 {
			break
		}
		wide += shown[last].width
		shown = slices.Delete(shown, last, last+1)
	}
	return shown, max(wide, 8)
}

// keys are the forms of the last line, from the longest.
var keys = []string{
	"1 services 2 endpoints 3 clients 4 nodes | sort: o new n open b bytes e errors c connect f first byte a name | enter into, / filter, esc all, p pause, ? help, q quit",
	"1-4 view | sort: o new n open b bytes e err c conn f byte a name | / ? help q quit",
	"1-4 view, onbecfa sort, / ? help q quit",
}

// keysFor returns the longest form of the last line that fits.
func keysFor(width int) string {
	for _, k := range keys {
		if len(k) <= width {
			return k
		}
	}
	return keys[len(keys)-1]
}

// View implements tea.Model.
func (m *Model) View() string {
	var b strings.Builder
	name := m.query.By
	for _, g := range groupings {
		if g.by == m.query.By {
			name = g.name
		}
	}
	head := name + " by " + m.query.Sort
	if m.paused {
		head += " - paused"
	}
	head += " - sluice top, node " + printable.Name(m.node)
	b.WriteString(bold + cut(head, m.width) + plain + "\n")
	switch {
	case m.editing:
		b.WriteString(tail("filter: "+printable.Text(m.input)+"_", m.width) + "\n")
	case m.query.Filter != "":
		b.WriteString(cut("filter: "+printable.Text(m.query.Filter), m.width) + "\n")
	default:
		b.WriteString("\n")
	}
	switch {
	case m.problem != "" && m.editing:
		b.WriteString(cut(printable.Text(m.problem), m.width) + "\n")
	case m.err != nil:
		b.WriteString(cut(printable.Text(m.err.Error()), m.width) + "\n")
	case m.frame == nil:
		b.WriteString("measuring ...\n")
	default:
		b.WriteString(cut(totals(m.frame), m.width) + "\n")
	}
	if m.helping {
		m.writeHelp(&b)
	} else {
		m.table(&b)
	}
	b.WriteString(cut(keysFor(m.width), m.width))
	return b.String()
}

// totals says what all rows do together.
func totals(f *api.Frame) string {
	t := &f.Total
	text := fmt.Sprintf("%d open, %s new/s, %s failed/s, %s/s up, %s/s down, %d rows", t.Open, rate(t.Opened), rate(t.Failed),
		amount.Bytes(uint64(t.BytesFromClient)), amount.Bytes(uint64(t.BytesFromEndpoint)), f.Groups)
	if f.Lost > 0 {
		text += fmt.Sprintf(", %d records were not counted", f.Lost)
	}
	return text
}

// room returns how many rows there is room for.
func (m *Model) room() int { return max(m.height-5, 1) }

// table writes the rows that there is room for, around the selected one.
func (m *Model) table(b *strings.Builder) {
	name := 28
	if strings.Contains(m.query.By, "endpoint") {
		name = 50
	}
	shown, wide := fitting(m.width, min(name, m.width*2/5), m.query.Sort)
	b.WriteString(bold + cut(header(shown, wide), m.width) + plain + "\n")
	room := m.room()
	if m.frame == nil {
		b.WriteString(strings.Repeat("\n", room))
		return
	}
	first := max(min(m.cursor-room/2, len(m.frame.Rows)-room), 0)
	for i := first; i < first+room; i++ {
		if i >= len(m.frame.Rows) {
			b.WriteString("\n")
			continue
		}
		line := cut(row(&m.frame.Rows[i], shown, wide), m.width)
		if i == m.cursor {
			line = reverse + line + plain
		}
		b.WriteString(line + "\n")
	}
}

// Table returns the rows of a frame with all columns, and with whole names: a program may
// read it. If rows have a proxy's node, it is the first column.
func Table(f *api.Frame) string {
	wide, node := 60, 0
	for i := range f.Rows {
		wide = max(wide, utf8.RuneCountInString(Name(&f.Rows[i]))+1)
		if name := f.Rows[i].ProxyNode; name != "" {
			node = max(node, utf8.RuneCountInString(printable.Name(name))+2, len("PROXY NODE")+2)
		}
	}
	var text strings.Builder
	line := func(name, rest string) { text.WriteString(pad(name, node) + rest + "\n") }
	line("PROXY NODE"[:min(node, len("PROXY NODE"))], header(columns, wide))
	for i := range f.Rows {
		line(printable.Name(f.Rows[i].ProxyNode), row(&f.Rows[i], columns, wide))
	}
	return text.String()
}

func header(shown []column, wide int) string {
	line := pad("NAME", wide)
	for _, c := range shown {
		line += right(c.name, c.width)
	}
	return line
}

func row(r *api.Rates, shown []column, wide int) string {
	name := cut(Name(r), wide-1)
	if r.Endpoint != "" { // the Service is the same in many rows
		name = tail(Name(r), wide-1)
	}
	line := pad(name, wide)
	for _, c := range shown {
		line += right(c.value(r), c.width)
	}
	return line
}

// Name returns what a row is about.
func Name(r *api.Rates) string {
	var parts []string
	for _, part := range []string{r.Client, r.Service, r.Endpoint, r.Pod} {
		if part != "" {
			parts = append(parts, printable.Name(part))
		}
	}
	if r.Endpoint == "" && r.Node != "" {
		parts = append(parts, printable.Name(r.Node))
	}
	if r.Protocol != "" && r.Protocol != "TCP" {
		parts = append(parts, r.Protocol)
	}
	if len(parts) == 0 {
		return "(others)"
	}
	return strings.Join(parts, " ")
}

// rate writes a number a second with three digits.
func rate(v float64) string {
	switch {
	case v == 0:
		return "0"
	case v < 9.95:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 0, 64)
}

func duration(us int64) string {
	if us == 0 {
		return "-"
	}
	return amount.Duration(time.Duration(us) * time.Microsecond)
}

func pad(s string, width int) string {
	return s + strings.Repeat(" ", max(width-utf8.RuneCountInString(s), 0))
}

func right(s string, width int) string {
	return strings.Repeat(" ", max(width-utf8.RuneCountInString(s), 1)) + s
}

// cut shortens a line.
func cut(s string, width int) string {
	if utf8.RuneCountInString(s) <= width || width < 1 {
		return s
	}
	return string([]rune(s)[:width-1]) + "~"
}

// tail shortens a text whose end matters more than its begin.
func tail(s string, width int) string {
	if n := utf8.RuneCountInString(s); n > width && width > 1 {
		return "~" + string([]rune(s)[n-width+1:])
	}
	return s
}
