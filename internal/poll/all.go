package poll

import "sync/atomic"

// PostAll runs f on each of some loops, with the loop's index. The channel is closed when
// all have run it, but for loops that have stopped. It is safe for concurrent use.
func PostAll(loops []*Loop, f func(i int)) (done <-chan struct{}) {
	all := make(chan struct{})
	var left atomic.Int32
	left.Store(int32(len(loops)) + 1)
	finish := func() {
		if left.Add(-1) == 0 {
			close(all)
		}
	}
	for i, l := range loops {
		if !l.Post(func() { defer finish(); f(i) }) {
			finish()
		}
	}
	finish()
	return all
}
