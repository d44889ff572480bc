// Package show writes the answers of the admin API for people: tables, lines, and a
// page of status.
package show

import (
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/sluice-proxy/sluice/internal/amount"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
)

// Table writes rows in columns. It learns the widths from the first rows, so that
// rows of a long list appear soon; later rows may be wider. The column of the
// proxy's node is left out if one proxy alone was asked.
type Table struct {
	out    io.Writer
	widths []int
	rows   [][]string // until the widths are known
	first  int        // the first column that is written
}

// learned is how many rows decide on the widths.
const learned = 500

// newTable returns a table with a header.
func newTable(out io.Writer, header []string) *Table {
	return &Table{out: out, widths: make([]int, len(header)), rows: [][]string{header}}
}

// Row adds a row.
func (t *Table) Row(cells ...string) error {
	if t.rows == nil {
		return t.write(cells)
	}
	if t.rows = append(t.rows, cells); len(t.rows) > learned {
		return t.Flush()
	}
	return nil
}

// Flush writes the rows that wait.
func (t *Table) Flush() error {
	rows := t.rows
	t.rows = nil
	if len(rows) > 0 && rows[0][0] == proxyNode && !slices.ContainsFunc(rows[1:], func(row []string) bool { return row[0] != "" }) {
		t.first = 1
	}
	for _, row := range rows {
		for i, cell := range row {
			t.widths[i] = max(t.widths[i], utf8.RuneCountInString(cell))
		}
	}
	for _, row := range rows {
		if err := t.write(row); err != nil {
			return err
		}
	}
	return nil
}

func (t *Table) write(row []string) error {
	var b strings.Builder
	for i, cell := range row {
		if i < t.first {
			continue
		}
		b.WriteString(cell)
		if i < len(row)-1 {
			b.WriteString(strings.Repeat(" ", max(t.widths[i]-utf8.RuneCountInString(cell), 0)+2))
		}
	}
	b.WriteByte('\n')
	_, err := io.WriteString(t.out, b.String())
	return err
}

// table writes a table of all rows.
func table[T any](out io.Writer, header []string, all []T, row func(*T) []string) error {
	t := newTable(out, header)
	for i := range all {
		if err := t.Row(row(&all[i])...); err != nil {
			return err
		}
	}
	return t.Flush()
}

// proxyNode is the heading of the column of the proxy's node.
const proxyNode = "PROXY NODE"

// Connections writes a table of connections.
type Connections struct {
	table *Table
	wide  bool
}

// NewConnections returns a table of connections, with all columns or the most
// important ones.
func NewConnections(out io.Writer, wide bool) *Connections {
	header := []string{proxyNode, "STATE", "SERVICE", "CLIENT", "ENDPOINT", "POD", "AGE", "UP", "DOWN"}
	if wide {
		header = append(header, "ID", "CLIENT POD", "PROTOCOL", "PATH", "VIP", "NODE", "ZONE", "SEEN AS", "ATTEMPTS", "CONNECT", "FIRST BYTE", "AFFINITY",
			"IDLE", "RTT CLIENT/ENDPOINT", "RETRANSMITS", "LOST", "UNACKED", "WINDOW")
	}
	return &Connections{table: newTable(out, header), wide: wide}
}

// dash stands for what is not known.
func dash(s string) string {
	if s == "" {
		return "-"
	}
	return printable.Name(s)
}

// us writes microseconds.
func us(n int64) string { return amount.Duration(time.Duration(n) * time.Microsecond) }

// known writes microseconds, or a dash.
func known(n *int64) string {
	if n == nil {
		return "-"
	}
	return us(*n)
}

// counts writes what both sides count.
func counts(client, endpoint *uint64) string {
	return both(client, endpoint, func(n uint64) string { return strconv.FormatUint(n, 10) })
}

// sizes writes the bytes of both sides.
func sizes(client, endpoint *uint64) string { return both(client, endpoint, amount.Bytes) }

func both(client, endpoint *uint64, text func(uint64) string) string {
	one := func(n *uint64) string {
		if n == nil {
			return "-"
		}
		return text(*n)
	}
	return one(client) + "/" + one(endpoint)
}

// Row adds a connection.
func (c *Connections) Row(o *api.Connection) error {
	cells := []string{
		printable.Name(o.ProxyNode), dash(o.State), dash(o.Service), dash(o.Client), dash(o.Endpoint), dash(o.Pod), us(o.DurationUS),
		amount.Bytes(o.BytesFromClient), amount.Bytes(o.BytesFromEndpoint),
	}
	if c.wide {
		seen := dash(o.SourceAddr)
		if o.Source != "" {
			seen = o.Source + " " + seen
		}
		cells = append(cells, strconv.FormatUint(o.ID, 10), dash(o.ClientPod), dash(o.Protocol), dash(o.Path), dash(o.VIP), dash(o.Node), dash(o.Zone),
			seen, strconv.Itoa(o.Attempts), known(o.ConnectUS), known(o.FirstByteUS), dash(o.Affinity),
			known(o.IdleUS), known(o.ClientRTTUS)+"/"+known(o.EndpointRTTUS), counts(o.ClientRetransmits, o.EndpointRetransmits), counts(o.ClientLost, o.EndpointLost),
			sizes(o.ClientUnacked, o.EndpointUnacked), sizes(o.ClientWindow, o.EndpointWindow))
	}
	return c.table.Row(cells...)
}

// Flush writes the rows that wait.
func (c *Connections) Flush() error { return c.table.Flush() }
