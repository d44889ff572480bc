package main

import (
	"os"
	"runtime"
	"runtime/debug"

	"github.com/sluice-proxy/sluice/service"
)

// settledGC is how much the heap may grow, in percent of what is in use, from
// one collection to the next once the first configuration is in force. Only
// changes of the configuration allocate much from then on, connections next to
// nothing, so that little room costs little CPU.
const settledGC = 25

// letGo lets go of the objects of the first configuration once the model is made
// of them: together they take as much memory as all that is kept in the end, and
// what is made of the model next can have it.
func letGo(c service.Change) {
	clear(c.Services)
	clear(c.EndpointSlices)
	runtime.GC()
}

// settleMemory gives memory back that only the start needed. It takes a
// collection, and should not be waited for.
func settleMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(settledGC)
	}
	debug.FreeOSMemory()
}
