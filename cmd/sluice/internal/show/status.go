package show

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/internal/amount"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
)

// Status writes the state of a proxy.
func Status(out io.Writer, s *api.Status) error {
	var b strings.Builder
	line := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-13s %s\n", name, printable.Text(fmt.Sprintf(format, args...)))
	}
	state := "all is in force"
	switch {
	case s.Trouble != "":
		state = "NOT all is in force: " + s.Trouble
	case !s.Ready:
		state = "waits for the first configuration"
	}
	line("proxy", "%s on node %s, process %d, up %s", s.Version.Version, s.Node, s.PID, amount.Duration(time.Since(s.Started)))
	line("state", "%s", state)
	source := s.Source
	if s.Connected != nil && !*s.Connected {
		source += ", which does not answer"
	}
	line("source", "%s; %d service ports, %d endpoints", source, s.Ports, s.Endpoints)
	steering := fmt.Sprintf("%d steered, %d refuse, %d drop, %d on this node's addresses", s.Steering.Steered, s.Steering.Refused, s.Steering.Silent, s.Steering.Own)
	if s.Steering.Lingering > 0 {
		steering += fmt.Sprintf(", %d gone but in use", s.Steering.Lingering)
	}
	line("steering", "%s", s.Steering.Choice)
	line("destinations", "%s", steering)
	if s.Steering.Repairs > 0 {
		line("", "%d repairs after other programs", s.Steering.Repairs)
	}
	switch {
	case s.FlowsLimit > 0:
		line("data path", "kernel, beside the relay: %d connections and sessions of at most %d", s.Flows, s.FlowsLimit)
		if s.NodeRelayed != "" {
			line("", "this node's own clients are relayed: %s", s.NodeRelayed)
		}
		if s.Judged != "" {
			line("", "the relay serves this node's own clients alone, as rules judge forwarded packets: %s", s.Judged)
		}
	case s.DataPathWhy != "":
		line("data path", "%s (%s)", s.DataPath, s.DataPathWhy)
	default:
		line("data path", "%s", s.DataPath)
	}
	line("relayed", "%d connections of at most %d, %d UDP sessions", s.Connections, s.Limit, s.Sessions)
	records := fmt.Sprintf("%s; %d lines", s.AccessLog.To, s.AccessLog.Written)
	if s.AccessLog.To == "-" {
		records = fmt.Sprintf("standard output; %d lines", s.AccessLog.Written)
	}
	if s.AccessLog.Dropped+s.AccessLog.Lost > 0 {
		records += fmt.Sprintf(", %d records dropped, %d lines lost", s.AccessLog.Dropped, s.AccessLog.Lost)
	}
	line("access log", "%s", records)
	if s.Log.Until != nil {
		line("log", "verbosity %d for another %s", s.Log.V, amount.Duration(time.Until(*s.Log.Until)))
	} else {
		line("log", "verbosity %d", s.Log.V)
	}
	for _, d := range s.Drained {
		line("drained", "%s", drained(&d))
	}
	if s.ProblemsAll > 0 {
		fmt.Fprintf(&b, "\n%d problems:\n", s.ProblemsAll)
		for _, p := range s.Problems {
			fmt.Fprintf(&b, "  %s: %s\n", printable.Text(p.Object), printable.Text(p.Text))
		}
		if more := s.ProblemsAll - len(s.Problems); more > 0 {
			fmt.Fprintf(&b, "  and %d more\n", more)
		}
	}
	_, err := io.WriteString(out, b.String())
	return err
}

// Drains writes what is drained.
func Drains(out io.Writer, all []api.Drained) error {
	if len(all) == 0 {
		_, err := fmt.Fprintln(out, "no endpoint is drained")
		return err
	}
	for i := range all {
		if _, err := fmt.Fprintln(out, printable.Text(drained(&all[i]))); err != nil {
			return err
		}
	}
	return nil
}

func drained(d *api.Drained) string {
	text := d.Endpoint
	if d.Pod != "" {
		text += " (" + d.Pod + ")"
	}
	text += fmt.Sprintf(" for %s, %d connections", amount.Duration(time.Since(d.Since)), d.Open)
	if len(d.Services) > 0 {
		text += ", of " + strings.Join(d.Services, ", ")
	} else {
		text += ", of no service now"
	}
	if len(d.LastResort) > 0 {
		text += "; still used by new connections to " + strings.Join(d.LastResort, ", ") + ", as no other endpoint that may serve them is ready"
	}
	return text
}
