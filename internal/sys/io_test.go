package sys

import (
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// Looking at what has arrived takes nothing away.
func TestPeek(t *testing.T) {
	l, addr := listen(t, "127.0.0.1", ListenOptions{})
	a, b := connected(t, l, addr)
	n, e := Send(a, []byte("hello"), false)
	must.Equal(t, e, 0)
	must.Equal(t, n, 5)
	until(t, b, EPOLLIN)
	p := make([]byte, 8)
	for _, tt := range []struct {
		read   func(int, []byte) (int, Errno)
		unread int // afterwards
	}{{Peek, 5}, {Peek, 5}, {Recv, 0}} {
		n, e := tt.read(b, p)
		must.Equal(t, e, 0)
		check.Equal(t, string(p[:n]), "hello")
		left, e := Unread(b)
		must.Equal(t, e, 0)
		check.Equal(t, left, tt.unread)
	}
}
