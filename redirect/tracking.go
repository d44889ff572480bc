package redirect

import (
	"bytes"
	"net"
	"sync/atomic"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Conntrack says whether our connections to endpoints are kept in connection tracking.
type Conntrack string

// The choices. Automatic, which "" means too, bypasses connection tracking until another
// program's rules look at the state of connections.
const (
	Automatic Conntrack = "auto"
	Bypass    Conntrack = "bypass"
	Keep      Conntrack = "keep"
)

// Conntracks are the choices.
var Conntracks = []string{string(Automatic), string(Bypass), string(Keep)}

// Tracking reports whether our connections to endpoints should bypass connection tracking.
// To bypass it costs something, and is worth it only in a network namespace that tracks
// connections: it does from the moment on that anybody's rule asks for a connection's
// state. And packets that bypass it have no state for rules that judge by it. Its methods
// are safe for concurrent use.
type Tracking struct {
	netns  int
	choice Conntrack
	judges func() (string, error)
	inUse  atomic.Bool
	kept   atomic.Pointer[string] // why connections are kept in it
	next   atomic.Int64           // Unix time in ns of the next call of judges
}

// NewTracking is for the namespace of a descriptor, 0 for that of the process. judges
// names a rule of somebody else's that looks at the state of connections, or returns "".
// It has not looked yet.
func NewTracking(netns int, choice Conntrack, judges func() (string, error)) *Tracking {
	t := &Tracking{netns: netns, choice: choice, judges: judges}
	if choice == Keep {
		why := "--conntrack=keep"
		t.kept.Store(&why)
	}
	return t
}

// InUse reports whether Look found that connections are tracked. It costs next to nothing.
func (t *Tracking) InUse() bool { return t.inUse.Load() }

// Kept reports whether connections to endpoints are kept in connection tracking, and why.
func (t *Tracking) Kept() (why string, kept bool) {
	if text := t.kept.Load(); text != nil {
		return *text, true
	}
	return "", false
}

// Bypassed reports whether they bypass it: nobody does where nothing is tracked.
func (t *Tracking) Bypassed() bool { return t.inUse.Load() && t.kept.Load() == nil }

// Look finds out, and reports whether connections are tracked: once they were, they stay
// so. The same holds for the rules that look at their state.
func (t *Tracking) Look() bool {
	if !t.InUse() {
		err := sys.InNetNS(t.netns, func() error {
			t.inUse.Store(hasTracked() || trySending("udp4", "127.0.0.1:0") && hasTracked() || trySending("udp6", "[::1]:0") && hasTracked())
			return nil
		})
		if err != nil {
			return true
		}
	}
	if t.InUse() {
		t.lookForJudges()
	}
	return t.InUse()
}

// lookForJudges takes a hundredth of the time at most, as the rules may be many.
func (t *Tracking) lookForJudges() {
	begin := time.Now()
	if t.judges == nil || t.choice == Keep || t.choice == Bypass || t.kept.Load() != nil || begin.UnixNano() < t.next.Load() {
		return
	}
	rule, err := t.judges()
	if err == nil && rule != "" {
		t.kept.Store(&rule)
	}
	t.next.Store(time.Now().Add(100 * time.Since(begin)).UnixNano())
}

// hasTracked reports whether the calling thread's namespace knows of a connection.
// Whoever may not know has to take it that it does.
func hasTracked() bool {
	count, err := sys.ReadKernelFile("/proc/sys/net/netfilter/nf_conntrack_count")
	return err != nil || !bytes.Equal(bytes.TrimSpace(count), []byte("0"))
}

// trySending sends a datagram from a socket to itself, which is tracked if
// anything is.
func trySending(network, address string) bool {
	c, err := net.ListenPacket(network, address)
	if err != nil {
		return false
	}
	defer c.Close()
	_, err = c.WriteTo([]byte{0}, c.LocalAddr())
	return err == nil
}
