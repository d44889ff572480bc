package flow

import (
	"net"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Records count datagrams, whether they come in fragments or many in one packet (GSO).
func TestRecordsCountDatagrams(t *testing.T) {
	for _, hidden := range []bool{false, true} {
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoUDP(t, 8080)
		n := newNode(t, lab, nil)
		n.config.MasqueradeAll = hidden
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
		c := lab.Client.Connect(t, "udp", vip4+":80")
		exchange := func(bytes, datagrams int) {
			t.Helper()
			must.OK(t, must.Err(c.Write(make([]byte, bytes))))
			for range datagrams {
				_ = c.SetReadDeadline(time.Now().Add(patience))
				must.OK(t, must.Err(c.Read(make([]byte, 1<<16))))
			}
		}
		exchange(1, 1)
		exchange(4000, 1) // in three fragments
		raw, err := c.(*net.UDPConn).SyscallConn()
		must.OK(t, err)
		must.OK(t, raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), syscall.IPPROTO_UDP, unix.UDP_SEGMENT, 100)
		}))
		must.OK(t, err)
		exchange(950, 10)
		n.finish()
		if r := n.taken(); len(r) != 1 || r[0].DatagramsFromClient != 12 || r[0].BytesFromClient != 4951 || r[0].DatagramsFromEndpoint != 12 {
			t.Errorf("hidden %v: %+v", hidden, r)
		}
	}
}

// The record of a session that was idle says how long it was there, as the relay's does: at least
// the time-out, and not less than until the first byte.
func TestRecordOfAShortSession(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		const timeout = 200 * time.Millisecond
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoUDP(t, 8080)
		n := newNode(t, lab, func(o *Options) { by(o); o.UDPTimeout = timeout })
		n.forgetsSoon()
		n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
		openSessions(t, lab, 5)
		wait.True(t, "the sessions end", func() bool { return n.endedBy(conntrack.Idle) == 5 })
		for _, r := range n.taken() {
			answered := r.DatagramsFromEndpoint > 0 // not late, on a busy machine
			if r.FirstByte > 0 != answered || r.FirstByte > r.Duration || r.Duration < int64(timeout) {
				t.Errorf("first byte after %s, end after %s", time.Duration(r.FirstByte), time.Duration(r.Duration))
			}
		}
	})
}
