// Package hangup takes SIGHUP from the first moments of sluice run on.
//
// The signal ends a program that does not take it, and main begins 6 to 9 ms after the
// start, on a busy machine 70 ms: packages with the API's types come first. Go initialises
// a package as soon as all that it imports are, so this one imports little and comes
// before them.
package hangup

import (
	"os"
	"os/signal"
	"syscall"
)

var signals = make(chan os.Signal, 1)

func init() {
	if len(os.Args) > 1 && os.Args[1] == "run" { // other commands end by it
		Notify()
	}
}

// Notify returns the channel that has SIGHUPs, earlier ones too.
func Notify() <-chan os.Signal {
	signal.Notify(signals, syscall.SIGHUP)
	return signals
}
