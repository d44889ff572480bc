package relay

import (
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// pipe is a kernel pipe. Its direction counts the bytes in it.
type pipe struct {
	r, w int
	size int // capacity in bytes
}

const (
	// smallestPipe is the smallest capacity for which two splices are cheaper than
	// a copy. Beyond the user's limit of pipe pages, the kernel creates pipes of
	// one or two pages.
	smallestPipe = 64 << 10
	// pipesKept is how many empty pipes a worker keeps. Directions borrow one for a
	// turn, so few are in use at a time.
	pipesKept = 8
	// pipePause is how long a worker does not create pipes after a failure.
	pipePause = int64(time.Second)
)

// pipePool keeps a worker's empty pipes. It returns the one used last first,
// because that is in the CPU cache.
type pipePool struct {
	free  []*pipe
	pause int64 // do not retry before this time
}

// take returns an empty pipe, or nil if the limit is reached or the process has no
// descriptors or pipe pages left. Then the caller copies.
func (pp *pipePool) take(w *Worker) *pipe {
	if last := len(pp.free) - 1; last >= 0 {
		p := pp.free[last]
		pp.free = pp.free[:last]
		return p
	}
	if w.loop.Now() < pp.pause {
		return nil
	}
	if !reserve(&w.relay.pipes, 1, int64(w.config.MaxPipes)) {
		return nil
	}
	p := newPipe(w)
	if p == nil {
		w.relay.pipes.Add(-1)
		pp.pause = w.loop.Now() + pipePause
	}
	return p
}

func newPipe(w *Worker) *pipe {
	r, wr, e := w.kernel.pipe()
	w.stats.Others++
	if e != 0 {
		return nil
	}
	p := &pipe{r: r, w: wr}
	size, want := 0, w.config.PipeSize
	for e = sys.EPERM; e != 0 && want >= smallestPipe; want /= 4 {
		w.stats.Others++
		size, e = w.kernel.setPipeSize(wr, want)
	}
	if e != 0 || size < smallestPipe {
		p.closeFDs(w)
		return nil
	}
	p.size = size
	return p
}

// put takes back an empty pipe.
func (pp *pipePool) put(w *Worker, p *pipe) {
	if len(pp.free) == pipesKept {
		p.destroy(w)
		return
	}
	pp.free = append(pp.free, p)
}

func (pp *pipePool) close(w *Worker) {
	for _, p := range pp.free {
		p.destroy(w)
	}
	pp.free = nil
}

// destroy closes a pipe and discards the bytes in it.
func (p *pipe) destroy(w *Worker) {
	p.closeFDs(w)
	w.relay.pipes.Add(-1)
}

func (p *pipe) closeFDs(w *Worker) {
	w.stats.Closes += 2
	w.kernel.close(p.r)
	w.kernel.close(p.w)
}
