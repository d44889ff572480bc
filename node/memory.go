package node

import (
	"os"
	"runtime"
	"runtime/debug"

	"github.com/sluice-proxy/sluice/service"
)

// settledGC is the value of GOGC once the first configuration is in force. From then
// on only changes of the configuration allocate much, and connections next to
// nothing, so a low value costs little CPU.
const settledGC = 25

// letGo drops the objects of the first configuration once the model is built of
// them: they take as much memory as everything that is kept, and the next steps can
// use it.
func letGo(c service.Change) {
	clear(c.Services)
	clear(c.EndpointSlices)
	runtime.GC()
}

// settleMemory returns memory to the system that only the start needed. It takes as
// long as a collection; nothing should wait for it.
func settleMemory() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(settledGC)
	}
	debug.FreeOSMemory()
}
