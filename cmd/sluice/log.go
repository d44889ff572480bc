package main

import (
	"encoding/json"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/rs/zerolog"
	"github.com/rs/zerolog/diode"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/node"
)

const (
	// logLines is how many lines of the program's own log may wait for their reader;
	// then the oldest are dropped.
	logLines = 1024
	// logPatience is how long the end of the program waits for that reader.
	logPatience = time.Second
)

// newLogger returns the program's own log, on standard error, and a function that
// writes queued lines. A slow reader delays neither changes nor the end of the
// program.
func newLogger(o *runOptions) (log zerolog.Logger, flush func()) {
	zerolog.SetGlobalLevel(node.LevelOf(o.node.Verbosity))
	zerolog.TimeFieldFormat = time.RFC3339Nano
	zerolog.DurationFieldFormat = zerolog.DurationFormatString // "1.2ms": with its unit
	zerolog.ErrorMarshalFunc = func(err error) any {
		if err == nil {
			return nil
		}
		return strings.Join(errorLines(err), "; ")
	}
	colours := isTerminal(os.Stderr) && os.Getenv("NO_COLOR") == ""
	formatted := func(out io.Writer) zerolog.Logger {
		return zerolog.New(formatLog(o.logFormat.value, out, colours)).Level(zerolog.TraceLevel).With().Timestamp().Logger()
	}
	direct := formatted(os.Stderr)
	out := diode.NewWriter(keepOpen{os.Stderr}, logLines, 0, func(lost int) {
		direct.Warn().Int("lines_lost", lost).Msg("this log was read too slowly; lines were dropped")
	})
	return formatted(out), func() { within(logPatience, func() { _ = out.Close() }) }
}

// errorLines returns the lines of an error, each once: errors of both address families
// are joined by newlines, and are often the same. What was said about all of them, such as
// "steering: ", is before the first line only.
func errorLines(err error) (lines []string) {
	for line := range strings.SplitSeq(err.Error(), "\n") {
		if !slices.ContainsFunc(lines, func(said string) bool { return said == line || strings.HasSuffix(said, ": "+line) }) {
			lines = append(lines, line)
		}
	}
	return lines
}

// formatLog returns what log lines become, in the form "text" or "json".
func formatLog(form string, out io.Writer, colours bool) io.Writer {
	if form == "json" {
		return printable.JSONWriter{W: out}
	}
	return textWriter(zerolog.ConsoleWriter{Out: out, TimeFormat: "15:04:05.000", NoColor: !colours})
}

// textWriter makes a console writer quote messages and lists too, as they hold names
// and texts of others.
func textWriter(w zerolog.ConsoleWriter) zerolog.ConsoleWriter {
	w.FormatPrepare = func(event map[string]any) error {
		for name, value := range event {
			switch value := value.(type) {
			case string:
				if name == zerolog.MessageFieldName {
					event[name] = printable.Text(value)
				}
			case []any, map[string]any:
				list, err := json.Marshal(value)
				if err != nil {
					return err
				}
				event[name] = json.RawMessage(printable.JSON(list))
			}
		}
		return nil
	}
	return w
}

// keepOpen hides a file's Close.
type keepOpen struct{ io.Writer }

// within waits for f, but no longer than patience.
func within(patience time.Duration, f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(patience):
	}
}
