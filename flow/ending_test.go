package flow

import (
	"math"
	"net"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Connections that begin between the moment when rules by states come and that when shortcuts end go on.
// If tracking saw the client's SYN alone, it would take what follows for invalid, for two minutes.
func TestConnectionsThatBeginWhileShortcutsEnd(t *testing.T) {
	t.Parallel()
	s := newShortcutNet(t, false)
	s.awaitMost()
	held := make(chan struct{})
	release := sync.OnceFunc(func() { close(held) })
	defer release()
	s.loop.Post(func() { <-held })
	s.lab.Node.NFT(t, "table inet other {"+states("")+"\n}")
	wait.True(t, "shortcuts are about to end", s.server.shortcuts.leaving.Load)
	control := s.server.kernel.Control
	atomic.StoreUint64(&control.ShortcutsUntil, math.MaxUint64) // a busy machine may take longer
	if atomic.LoadUint64(&control.ShortcutsEnding) == 0 {
		t.Error("BPF does not know that shortcuts are about to end")
	}
	// begin opens a connection, and says whether its packets take shortcuts.
	begin := func(vip string) bool {
		t.Helper()
		const questions = 20
		before := s.server.Stats().Kernel["shortcuts"]
		c := s.lab.Client.Connect(t, "tcp", net.JoinHostPort(vip, "80"))
		for range questions {
			must.OK(t, must.Err(line(c)))
		}
		s.conns = append(s.conns, c)
		return s.server.Stats().Kernel["shortcuts"]-before > questions // others acknowledge something meanwhile
	}
	atomic.StoreUint64(&control.ShortcutsEnding, 0) // as it was just before, when tracking had begun
	for _, vip := range []string{vip4, vip6} {
		if !begin(vip) {
			t.Errorf("%s: it takes no shortcuts", vip)
		}
	}
	atomic.StoreUint64(&control.ShortcutsEnding, uint64(sys.Monotonic()))
	for _, vip := range []string{vip4, vip6} {
		if begin(vip) {
			t.Errorf("%s: it takes shortcuts, and nobody may tell connection tracking", vip)
		}
	}
	if s.ask(10) == 0 {
		t.Error("shortcuts have ended before connection tracking knows of open connections")
	}
	release()
	s.awaitShortcuts(false)
	s.ask(10)
}
