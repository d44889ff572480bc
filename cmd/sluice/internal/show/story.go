package show

import (
	"cmp"
	"fmt"
	"io"
	"strings"

	"github.com/sluice-proxy/sluice/internal/amount"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/explain"
)

// Story writes what is known of one connection, and the verdict about it. now is what policy
// says now of its client and the address that it asked for, nil if it cannot be asked.
func Story(out io.Writer, c *api.Connection, now *explain.Answer) error {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-11s %s\n", name, printable.Text(fmt.Sprintf(format, args...)))
	}
	line("connection", "%d, %s, %s, by the data path %s", c.ID, c.Protocol, cmp.Or(c.State, "ended: "+c.End), c.Path)
	client := c.Client
	if c.ClientNode != "" {
		client += ", the node " + c.ClientNode
	}
	if c.ClientPod != "" {
		client += ", the pod " + c.ClientPod
	}
	if c.Via != "" {
		client += ", by way of " + c.Via
	}
	line("client", "%s", client)
	line("asked for", "%s (%s) %s", c.VIP, c.VIPKind, c.Service)
	line("began", "%s, %s", c.Time.Local().Format(explain.Moment), lasted(c))
	for _, a := range c.Failed {
		line("attempt", "%s %s: %s after %s", cmp.Or(a.Endpoint, "no endpoint"), a.Pod, a.Error, us(a.US))
	}
	if c.ConnectUS != nil || len(c.Failed) < c.Attempts {
		line("endpoint", "%s %s on %s %s", c.Endpoint, c.Pod, cmp.Or(c.Node, "an unknown node"), c.Zone)
	}
	if c.WaitedUS != nil {
		line("waited", "%s before it was dialled", us(*c.WaitedUS))
	}
	line("times", "connect %s, first byte %s", known(c.ConnectUS), known(c.FirstByteUS))
	line("bytes", "%s from the client, %s from the endpoint", amount.Bytes(c.BytesFromClient), amount.Bytes(c.BytesFromEndpoint))
	if c.IdleUS != nil {
		line("idle", "%s", us(*c.IdleUS))
	}
	tcp := func(name string, rtt, idle *int64, unacked, unsent, window, again, lost *uint64) {
		var list []string
		if rtt != nil {
			list = append(list, "round trip "+us(*rtt))
		}
		if idle != nil {
			list = append(list, "silent for "+us(*idle))
		}
		for _, n := range []struct {
			value *uint64
			text  string
		}{{unacked, "not acknowledged"}, {unsent, "not sent"}, {window, "of window"}} {
			if n.value != nil {
				list = append(list, amount.Bytes(*n.value)+" "+n.text)
			}
		}
		if again != nil {
			list = append(list, fmt.Sprintf("%d segments sent again", *again))
		}
		if lost != nil {
			list = append(list, fmt.Sprintf("%d of its segments lost on their way here", *lost))
		}
		if list != nil {
			line(name, "%s", strings.Join(list, ", "))
		}
	}
	tcp("to client", c.ClientRTTUS, c.ClientIdleUS, c.ClientUnacked, c.ClientUnsent, c.ClientWindow, c.ClientRetransmits, c.ClientLost)
	tcp("to endpoint", c.EndpointRTTUS, c.EndpointIdleUS, c.EndpointUnacked, c.EndpointUnsent, c.EndpointWindow, c.EndpointRetransmits, c.EndpointLost)
	if v := c.Verdict; v != nil {
		line("verdict", "%s: %s", culprit(v.Who), v.Why)
	}
	switch {
	case now == nil:
	case now.Service != c.Service:
		line("note", "the address is now of %s", cmp.Or(now.Service, "no Service"))
	case now.Since.After(c.Time):
		line("note", "the Service, its endpoints or this node have changed since it began, at %s: sluice explain says how the proxy would decide now", now.Since.Local().Format(explain.Moment))
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// lasted writes how long ago an open connection began, or how long one lasted.
func lasted(c *api.Connection) string {
	if c.End != "" {
		return "for " + us(c.DurationUS)
	}
	return us(c.DurationUS) + " ago"
}

// culprit writes who is to blame.
func culprit(who string) string {
	switch who {
	case "client", "pod":
		return "the " + who
	case "client_network", "pod_network":
		return "the " + strings.TrimSuffix(who, "_network") + "'s network"
	case "node":
		return "this node"
	}
	return who
}
