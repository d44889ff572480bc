package main

import (
	"os"
	"runtime/debug"
)

// settledGC is how much the heap may grow, in percent of what is in use, from
// one collection to the next once the first configuration is in force. Only
// changes of the configuration allocate much from then on, connections next to
// nothing, so that little room costs little CPU.
const settledGC = 25

// settleMemory gives back what the first configuration was read from: its
// objects take about as much as what is kept of them. It takes a collection,
// and should not be waited for.
func settleMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(settledGC)
	}
	debug.FreeOSMemory()
}
