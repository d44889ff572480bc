package show

import (
	"cmp"
	"io"
	"strconv"
	"time"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/blame"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/slow"
	"github.com/sluice-proxy/sluice/internal/amount"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
)

// Blame writes a table of endpoints with their failures.
func Blame(out io.Writer, all []blame.Failures, now time.Time) error {
	return table(out, []string{proxyNode, "COUNT", "SERVICE", "ENDPOINT", "POD", "NODE", "ERROR", "LAST", "FIRST", "CLIENTS", "LAST CLIENT"}, all, func(f *blame.Failures) []string {
		age := func(at time.Time) string { return amount.Duration(max(now.Sub(at), 0)) + " ago" }
		count := strconv.Itoa(f.Count)
		if f.Packets > 0 { // refused or dropped
			count += " (" + packets(f.Packets) + ")"
		}
		return []string{printable.Name(f.ProxyNode), count, dash(cmp.Or(f.Service, f.VIP)), dash(f.Endpoint), dash(f.Pod), dash(f.Node), dash(f.Error),
			age(f.Last), age(f.First), strconv.Itoa(f.Clients), dash(f.LastClient)}
	})
}

// Failures writes a table of failed attempts, with their ages.
func Failures(out io.Writer, all []api.Failure, now time.Time) error {
	return table(out, []string{proxyNode, "AGE", "SERVICE", "ENDPOINT", "POD", "NODE", "ERROR", "AFTER", "CLIENT"}, all, func(f *api.Failure) []string {
		service, after := f.Service, us(f.US)
		if f.Packets > 0 { // refused or dropped
			service, after = cmp.Or(service, f.VIP), packets(f.Packets)
		}
		return []string{printable.Name(f.ProxyNode), amount.Duration(max(now.Sub(f.Time), 0)), dash(service), dash(f.Endpoint), dash(f.Pod), dash(f.Node),
			dash(f.Error), after, dash(f.Client)}
	})
}

// Slow writes a table of slow endpoints.
func Slow(out io.Writer, all []slow.Endpoint) error {
	return table(out, []string{proxyNode, "SERVICE", "ENDPOINT", "POD", "NODE", "LATE", "FIRST BYTE P50", "P99", "OTHERS' P50", "P99", "CONNECT P50", "OTHERS'"},
		all, func(e *slow.Endpoint) []string {
			p50, p99 := us(e.FirstP50US), us(e.FirstP99US)
			if e.Late == slow.NoAnswer {
				p50, p99 = "-", ">"+us(e.UnansweredUS)
			}
			return []string{printable.Name(e.ProxyNode), dash(e.Service), e.Endpoint, dash(e.Pod), dash(e.Node), e.Late, p50, p99,
				us(e.SiblingFirstP50US), us(e.SiblingFirstP99US), us(e.ConnectP50US), us(e.SiblingConnectP50US)}
		})
}

// Nodes writes a table of the states of proxies.
func Nodes(out io.Writer, all []api.Status) error {
	return table(out, []string{proxyNode, "STATE", "VERSION", "UP", "SERVICE PORTS", "ENDPOINTS", "DATA PATH", "RELAYED", "FLOWS", "PROBLEMS", "TROUBLE"},
		all, func(s *api.Status) []string {
			state := "in force"
			if !s.Ready {
				state = "NOT in force"
			}
			return []string{printable.Name(s.Node), state, dash(s.Version.Version), amount.Duration(max(time.Since(s.Started), 0)), strconv.Itoa(s.Ports), strconv.Itoa(s.Endpoints),
				dash(s.DataPath), strconv.FormatInt(s.Connections+s.Sessions, 10), strconv.FormatInt(s.Flows, 10), strconv.Itoa(s.ProblemsAll), dash(s.Trouble)}
		})
}

// Destinations writes a table of destinations.
func Destinations(out io.Writer, all []api.Destination) error {
	return table(out, []string{"PROTOCOL", "DESTINATION", "STEERING", "SERVICE"}, all, func(d *api.Destination) []string {
		return []string{dash(d.Protocol), dash(d.Destination), dash(d.Steering), dash(d.Service)}
	})
}
