package stream

import (
	"testing"
	"unsafe"
)

// An idle connection is this and two descriptors: no buffer, no goroutine, no
// timer of its own. The promise is 1 KiB; the rest is for the allocator and the
// event loop's slots.
func TestConnectionIsSmall(t *testing.T) {
	const most = 704 // a size class of the allocator
	if got := unsafe.Sizeof(tcpConn{}); got > most {
		t.Errorf("a connection takes %d bytes, want at most %d", got, most)
	}
	t.Logf("%d bytes", unsafe.Sizeof(tcpConn{}))
}
