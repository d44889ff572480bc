package doctor

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"
	"unicode/utf8"

	"github.com/sluice-proxy/sluice/internal/printable"
)

// Widths of what is wrapped, in characters, so that no line is longer than textWidth.
const (
	textWidth   = 120
	foundWidth  = 30
	neededWidth = 34
)

// WriteText writes the report for people: a row for each feature, and under it
// what to do if something is not as it should be.
func (r *Report) WriteText(w io.Writer) error {
	var rows strings.Builder
	table := tabwriter.NewWriter(&rows, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "STATE\tFEATURE\tFOUND\tNEEDED BY")
	for _, f := range r.Findings {
		found, needed := wrap(printable.Text(f.Found), foundWidth), wrap(f.NeededBy, neededWidth)
		state, feature := string(f.State), f.Feature
		for i := range max(len(found), len(needed)) {
			fmt.Fprintln(table, strings.Join([]string{state, feature, at(found, i), at(needed, i)}, "\t"))
			state, feature = "", ""
		}
	}
	if err := table.Flush(); err != nil {
		return err
	}
	for line := range strings.Lines(rows.String()) {
		fmt.Fprintln(w, strings.TrimRight(line, " \n"))
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
		fmt.Fprintln(w, "  "+strings.Join(wrap(f.Feature+": "+printable.Text(f.Remedy), textWidth-4), "\n    "))
	}
	verdict := "\nNo steering mode works here."
	if r.Works() {
		verdict = "\nsluice run steers by " + r.Chosen + " here."
	}
	_, err := fmt.Fprintln(w, verdict)
	return err
}

// wrap breaks a text between words into lines of at most so many characters, or of one word.
func wrap(text string, width int) []string {
	var lines []string
	for word := range strings.FieldsSeq(text) {
		if n := len(lines) - 1; n >= 0 && utf8.RuneCountInString(lines[n])+1+utf8.RuneCountInString(word) <= width {
			lines[n] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}

// at returns a line, or nothing behind the last one.
func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return ""
}

// WriteJSON writes the report for programs.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(printable.JSONWriter{W: w})
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(r)
}
