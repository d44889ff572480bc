package redirect

import (
	"bytes"
	"net"
	"os"
	"sync/atomic"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// Tracking tells whether a network namespace tracks connections: it does from
// the moment on that anybody's rule asks for a connection's state. To pass
// connection tracking by costs something, and is worth it only then. Its methods
// are safe for concurrent use.
type Tracking struct {
	netns int
	inUse atomic.Bool
}

// NewTracking is for the namespace of a descriptor, 0 for that of the process.
// It has not looked yet.
func NewTracking(netns int) *Tracking { return &Tracking{netns: netns} }

// InUse tells what Look found. It costs next to nothing.
func (t *Tracking) InUse() bool { return t.inUse.Load() }

// Look finds out, and tells: once it was in use, it stays so.
func (t *Tracking) Look() bool {
	if t.InUse() {
		return true
	}
	err := sys.InNetNS(t.netns, func() error {
		t.inUse.Store(hasTracked() || trySending("udp4", "127.0.0.1:0") && hasTracked() || trySending("udp6", "[::1]:0") && hasTracked())
		return nil
	})
	return err != nil || t.InUse()
}

// hasTracked tells whether the calling thread's namespace knows of a connection.
// Whoever may not know has to take it that it does.
func hasTracked() bool {
	count, err := os.ReadFile("/proc/sys/net/netfilter/nf_conntrack_count")
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
