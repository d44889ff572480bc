package flow

import (
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// vanish closes a client's socket, and nobody hears of it: as if its host had lost its power.
func vanish(t *testing.T, c net.Conn) {
	t.Helper()
	raw, err := c.(*net.TCPConn).SyscallConn()
	must.OK(t, err)
	if controlErr := raw.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_TCP, unix.TCP_REPAIR, 1) }); controlErr != nil || err != nil {
		t.Fatal(controlErr, err)
	}
	must.OK(t, c.Close())
}

// A client that comes back with its port, and knows nothing of the connection that it had,
// connects before its SYN has been sent a third time, whatever has become of the endpoint.
func TestClientComesBackWithItsPort(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what   string
		hidden bool
		change func(*node)
		want   string // who answers
	}{
		{"the endpoint has the old connection", false, func(*node) {}, "b1:8080"},
		{"the same, hidden", true, func(*node) {}, "b1:8080"},
		{"the endpoint is silent, and another one serves", false, func(n *node) { n.silence(0); n.serve(1) }, "b2:8080"},
		{"the same, hidden", true, func(n *node) { n.silence(0); n.serve(1) }, "b2:8080"},
		{"the endpoint is silent, and one of two", false, func(n *node) { n.silence(0); n.serve(0, 1) }, "b2:8080"},
	} {
		t.Run(c.what, func(t *testing.T) {
			t.Parallel()
			forDeciders(t, func(t *testing.T, by func(*Options)) {
				lab := netns.NewLab(t, 2)
				for _, b := range lab.Backends {
					b.WitnessTCP(t, 8080)
				}
				n := newNode(t, lab, by)
				n.config.MasqueradeAll = c.hidden
				n.relay.options.Plan = hasty
				n.serve(0)
				first := dialFrom(t, lab.Client, 45678, vip4+":80")
				if said, err := netns.AskOn(first); err != nil || !strings.HasPrefix(said, "b1:8080 ") {
					t.Fatalf("%q, %v", said, err)
				}
				c.change(n)
				vanish(t, first)
				began := time.Now()
				again := dialFrom(t, lab.Client, 45678, vip4+":80")
				took := time.Since(began)
				if said, err := netns.AskOn(again); err != nil || !strings.HasPrefix(said, c.want+" ") {
					t.Fatalf("%q, %v", said, err)
				}
				t.Logf("it took %s", took)
				_ = again.Close()
				wait.True(t, "two records", func() bool { return len(n.taken()) == 2 })
				for _, r := range n.taken() {
					if r.Path != conntrack.Kernel || r.BytesFromEndpoint == 0 {
						t.Errorf("%+v", r)
					}
				}
				if r := n.taken()[0]; r.End != conntrack.ClientReset {
					t.Errorf("%+v", r)
				}
			})
		})
	}
}

// silence has a backend answer nothing more.
func (n *node) silence(backend int) {
	n.t.Helper()
	must.OK(n.t, n.lab.Backends[backend].SetDown("eth0"))
}

// serve applies a Service with some of the lab's backends.
func (n *node) serve(backends ...int) {
	var list []netip.AddrPort
	for _, b := range backends {
		list = append(list, at(n.lab.Backends[b].IPv4, 8080))
	}
	n.apply(svc(vip4, nil, list...))
}

// A SYN that somebody forges in a client's name, and whatever RST he guesses, changes nothing of
// the client's connection.
func TestForgedSYNChangesNoConnection(t *testing.T) {
	t.Parallel()
	forDeciders(t, func(t *testing.T, by func(*Options)) {
		lab := netns.NewLab(t, 2)
		lab.Backends[0].EchoTCP(t, 8080)
		n := newNode(t, lab, by)
		n.serve(0)
		c := must.Get(lab.Client.Dial("tcp", vip4+":80"))(t)
		defer c.Close()
		must.OK(t, must.Err(netns.AskOn(c)))
		client, vip := netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(vip4+":80")
		k := n.openFlow()
		for i := range uint32(20) {
			sendSegment(t, lab.Backends[1], client, vip, 1000+i, 0, flagSYN)
			wait.True(t, "a challenge", func() bool { return atomic.LoadUint32(&k.Challenge) != 0 })
			sendSegment(t, lab.Backends[1], client, vip, k.Challenge+1+i, 0, flagRST)
			back := make([]byte, 6)
			_ = c.SetDeadline(time.Now().Add(patience))
			must.OK(t, must.Err(fmt.Fprint(c, "again\n")))
			if _, err := c.Read(back); err != nil || string(back) != "again\n" {
				t.Fatalf("%q, %v", back, err)
			}
		}
		check.Equalf(t, len(n.taken()), 0, "%+v", n.taken())
	})
}

// Of a flow's forged SYNs, one in challengeInterval is answered, and those of a service port that wait
// count as its first packets do.
func TestForgedSYNsAreAnsweredSeldom(t *testing.T) {
	lab := netns.NewLab(t, 2)
	lab.Backends[0].EchoTCP(t, 8080)
	n := newNode(t, lab, func(*Options) {})
	n.serve(0)
	c := lab.Client.Connect(t, "tcp", vip4+":80")
	must.OK(t, must.Err(netns.AskOn(c)))
	client, vip := netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(vip4+":80")
	k, w, done := n.openFlow(), n.server.worker, make(chan struct{})
	waits := func() bool { return atomic.LoadUint32((*uint32)(&k.Seen))&uint32(bpf.KernelSeenCHALLENGED) != 0 }
	l := &w.kernel.Loads[k.Service]
	n.loop.Post(func() {
		defer close(done)
		sendSegment(t, lab.Backends[1], client, vip, 1000, 0, flagSYN)
		for w.upcalls.AvailableBytes() == 0 {
			runtime.Gosched()
		}
		check.Equalf(t, atomic.LoadUint64(&l.Asked)-atomic.LoadUint64(&l.Decided), 1, "upcalls wait")
		w.read(w.upcalls, upcallShare, w.handle)
		w.endRound()
		check.Equalf(t, atomic.LoadUint64(&l.Asked)-atomic.LoadUint64(&l.Decided), 0, "upcalls that wait")
		if len(w.challenged) != 1 || !waits() {
			t.Errorf("%+v, the next SYN waits: %t", w.challenged, waits())
			return
		}
		due := w.challenged[0].due
		if w.unchallenge(due - 1); !waits() {
			t.Error("the next SYN is told of too early")
		}
		if w.unchallenge(due); waits() || len(w.challenged) != 0 {
			t.Errorf("the next SYN is not told of; %+v", w.challenged)
		}
	})
	<-done
}
