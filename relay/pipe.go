package relay

import (
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// pipe is a kernel pipe. What it holds is counted by the direction that has it.
type pipe struct {
	next *pipe // in the pool
	r, w int
	size int // capacity in bytes
}

const (
	// smallestPipe is the smallest capacity that is worth two system calls
	// instead of one copy. Beyond the user's budget of pipe pages the kernel
	// makes pipes of one or two pages.
	smallestPipe = 64 << 10
	// pipesKept is how many empty pipes a worker keeps. Directions borrow one
	// for a turn, so that few are in use at a time.
	pipesKept = 8
	// pipePause is how long a worker does without after it could not make a
	// pipe.
	pipePause = int64(time.Second)
)

// pipePool keeps a worker's empty pipes; the one used last is warm in the
// caches and comes first.
type pipePool struct {
	free  *pipe
	count int
	pause int64 // make none before
}

// take returns an empty pipe, or nil: then there are too many, or the
// process has no descriptors or no budget left, and the caller copies.
func (pp *pipePool) take(w *Worker) *pipe {
	if p := pp.free; p != nil {
		pp.free, p.next = p.next, nil
		pp.count--
		return p
	}
	if w.loop.Now() < pp.pause {
		return nil
	}
	for made := w.relay.pipes.Load(); ; made = w.relay.pipes.Load() {
		if made >= int64(w.config.MaxPipes) {
			return nil
		}
		if w.relay.pipes.CompareAndSwap(made, made+1) {
			break
		}
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

// put takes back a pipe that is empty.
func (pp *pipePool) put(w *Worker, p *pipe) {
	if pp.count == pipesKept {
		p.destroy(w)
		return
	}
	p.next, pp.free = pp.free, p
	pp.count++
}

func (pp *pipePool) close(w *Worker) {
	for pp.free != nil {
		p := pp.free
		pp.free = p.next
		p.destroy(w)
	}
	pp.count = 0
}

// destroy closes a pipe with what it holds.
func (p *pipe) destroy(w *Worker) {
	p.closeFDs(w)
	w.relay.pipes.Add(-1)
}

func (p *pipe) closeFDs(w *Worker) {
	w.stats.Closes += 2
	w.kernel.close(p.r)
	w.kernel.close(p.w)
}
