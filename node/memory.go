package node

import (
	"os"
	"runtime"
	"runtime/debug"

	"github.com/sluice-proxy/sluice/service"
)

// settledGC is the value of GOGC once the first configuration is in force, or less in a large
// cluster, so that garbage takes settledRoom at most. From then on only changes of the configuration
// allocate much, and connections next to nothing, so a low value costs little CPU. Connections that
// move to another process allocate, and wait for it: then the value is movingGC, Go's default.
const (
	settledGC   = 25
	leastGC     = 10
	settledRoom = 64 << 20
	movingGC    = 100
)

// settledFor returns the value of GOGC for so much memory in use.
func settledFor(inUse uint64) int {
	return min(settledGC, max(leastGC, int(settledRoom*100/max(inUse, 1))))
}

// setGC sets the value of GOGC, unless the operator has.
func setGC(value int) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(value)
	}
}

// letGo drops the objects of the first configuration once the model is built of
// them: they take as much memory as everything that is kept, and the next steps can
// use it. The collection runs beside them.
func letGo(c service.Change) {
	clear(c.Services)
	clear(c.EndpointSlices)
	clear(c.Slices)
	go runtime.GC()
}

// settleMemory returns memory to the system that only the start needed, and what the process
// before has given. It takes as long as a collection; nothing should wait for it.
func (p *Proxy) settleMemory() {
	if p.before != nil {
		<-p.before.left
	}
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	setGC(settledFor(m.HeapAlloc))
}
