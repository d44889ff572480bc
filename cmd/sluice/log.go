package main

import (
	"os"
	"time"

	"github.com/rs/zerolog"
)

// newLogger gives the program's own log, on standard error.
func newLogger(o *runOptions) zerolog.Logger {
	level := zerolog.InfoLevel
	switch {
	case o.verbosity >= 6:
		level = zerolog.TraceLevel
	case o.verbosity >= 4:
		level = zerolog.DebugLevel
	}
	zerolog.TimeFieldFormat = time.RFC3339Nano
	if o.logFormat.value == "json" {
		return zerolog.New(os.Stderr).Level(level).With().Timestamp().Logger()
	}
	out := zerolog.ConsoleWriter{Out: os.Stderr, TimeFormat: "15:04:05.000", NoColor: !isTerminal(os.Stderr)}
	return zerolog.New(out).Level(level).With().Timestamp().Logger()
}

// isTerminal tells whether somebody looks at what is written, and wants colours.
func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	_, unwanted := os.LookupEnv("NO_COLOR")
	return err == nil && info.Mode()&os.ModeCharDevice != 0 && !unwanted
}
