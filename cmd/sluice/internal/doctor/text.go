package doctor

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/sluice-proxy/sluice/internal/printable"
)

// WriteText writes the report for people: a row for each feature, and under it
// what to do if something is not as it should be.
func (r *Report) WriteText(w io.Writer) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "STATE\tFEATURE\tFOUND\tPROBED BY\tNEEDED BY")
	for _, f := range r.Findings {
		fmt.Fprintln(table, strings.Join([]string{string(f.State), f.Feature, printable.Text(f.Found), f.Probed, f.NeededBy}, "\t"))
	}
	if err := table.Flush(); err != nil {
		return err
	}
	first := true
	for _, f := range r.Findings {
		if f.Remedy == "" {
			continue
		}
		if first {
			fmt.Fprintln(w, "\nWhat to do:")
			first = false
		}
		fmt.Fprintf(w, "  %s: %s\n", f.Feature, printable.Text(f.Remedy))
	}
	verdict := "\nNo steering mode works here."
	if r.Works() {
		verdict = "\nsluice run steers by " + r.Chosen + " here."
	}
	_, err := fmt.Fprintln(w, verdict)
	return err
}

// WriteJSON writes the report for programs.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(printable.JSONWriter{W: w})
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}
