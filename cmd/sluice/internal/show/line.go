package show

import (
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/sluice-proxy/sluice/internal/amount"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
)

// Lines writes connections as Line returns them.
type Lines struct{ Out io.Writer }

// Row writes a connection.
func (l Lines) Row(c *api.Connection) error {
	_, err := fmt.Fprintln(l.Out, Line(c))
	return err
}

// packets counts them in words.
func packets(n uint64) string {
	if n == 1 {
		return "1 packet"
	}
	return strconv.FormatUint(n, 10) + " packets"
}

// Flush does nothing: no row waits.
func (l Lines) Flush() error { return nil }

// Line returns a record as the access log's console form has it; see package conntrack.
func Line(c *api.Connection) string {
	var b strings.Builder
	b.WriteString(c.Time.Local().Format("01-02 15:04:05.000"))
	add := func(before, text string) {
		if text != "" {
			b.WriteString(before + text)
		}
	}
	add(" node ", printable.Name(c.ClientNode))
	refused := c.Event == "refused" // its packets may have had several ports
	if client, found := strings.CutSuffix(c.Client, ":0"); refused && found {
		add(" ", strings.Trim(client, "[]"))
	} else {
		add(" ", c.Client)
	}
	add(" ", printable.Name(c.ClientPod))
	add(" -> ", c.VIP)
	if c.Protocol != "TCP" {
		add(" ", c.Protocol)
	}
	add(" ", printable.Name(c.Service))
	if refused {
		fmt.Fprintf(&b, " | %s refused | %s", packets(c.Packets), c.End)
		return b.String()
	}
	if c.ConnectUS != nil || len(c.Failed) < c.Attempts {
		add(" -> ", c.Endpoint)
		add(" ", podName(c.Pod))
		add(" on ", printable.Name(c.Node))
		add(" from ", c.SourceAddr)
	}
	for i, a := range c.Failed {
		if i == 0 {
			fmt.Fprintf(&b, " | %d attempts:", c.Attempts)
		} else {
			b.WriteByte(',')
		}
		add(" ", a.Endpoint)
		add(" ", podName(a.Pod))
		add(" ", a.Error)
		add(" ", us(a.US))
	}
	if c.Affinity != "none" {
		add(" | affinity ", c.Affinity)
	}
	b.WriteString(" | ")
	if c.WaitedUS != nil {
		fmt.Fprintf(&b, "waited %s, ", us(*c.WaitedUS))
	}
	if c.ConnectUS != nil {
		fmt.Fprintf(&b, "connect %s, ", us(*c.ConnectUS))
	}
	if c.FirstByteUS != nil {
		fmt.Fprintf(&b, "first byte %s, ", us(*c.FirstByteUS))
	}
	add("total ", us(c.DurationUS))
	if c.IdleUS != nil {
		fmt.Fprintf(&b, " | rtt %s/%s, retransmits %s, lost %s", known(c.ClientRTTUS), known(c.EndpointRTTUS),
			counts(c.ClientRetransmits, c.EndpointRetransmits), counts(c.ClientLost, c.EndpointLost))
	}
	add(" | ", moved(c.BytesFromClient, c.DatagramsFromClient, c.MessagesFromClient)+" up")
	add(", ", moved(c.BytesFromEndpoint, c.DatagramsFromEndpoint, c.MessagesFromEndpoint)+" down")
	add(" | ", c.End+c.Event)
	return b.String()
}

// podName returns a pod's name without its namespace.
func podName(pod string) string {
	_, name, _ := strings.Cut(pod, "/")
	return printable.Name(name)
}

// moved writes the bytes of one direction, and how many datagrams or messages they
// came in.
func moved(bytes uint64, counts ...*uint64) string {
	text := amount.Bytes(bytes)
	for _, n := range counts {
		if n != nil {
			text += fmt.Sprintf(" in %d", *n)
		}
	}
	return text
}
