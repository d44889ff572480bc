package flow

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// long is the length of a packet that gets lost.
const long = 400

const flagFIN = 1

// A connection ends for BPF too if its last data was lost before the node, and its end was not. The
// FIN counts once it is acknowledged, although the repeated data lacks it. An RST counts that the
// receiver believes silently because it follows the last block that it has.
func TestEndBehindAGapIsSeen(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		what   string
		resets bool
		ends   [2]conntrack.End // by client, endpoint
	}{
		{"FIN", false, [2]conntrack.End{conntrack.ClientFin, conntrack.EndpointFin}},
		{"RST", true, [2]conntrack.End{conntrack.ClientReset, conntrack.EndpointReset}},
	} {
		for side, who := range []string{"client", "endpoint"} {
			t.Run(fmt.Sprint(c.what, " of the ", who), func(t *testing.T) {
				t.Parallel()
				forDeciders(t, func(t *testing.T, by func(*Options)) {
					lab := netns.NewLab(t, 1)
					accepted, done := make(chan *net.TCPConn, 1), make(chan struct{})
					lab.Backends[0].ServeTCP(t, ":8080", func(c *net.TCPConn) {
						accepted <- c
						<-done
					})
					defer close(done)
					n := newNode(t, lab, by)
					n.serve(0)
					conn, err := lab.Client.Dial("tcp", vip4+":80")
					must.OK(t, err)
					ends := [2]*net.TCPConn{conn.(*net.TCPConn), <-accepted}
					host := [2]*netns.Host{lab.Client, lab.Backends[0]}[side]
					from, to := ends[side], ends[1-side]
					_ = to.SetDeadline(time.Now().Add(patience))
					stop := host.Lose(t, "eth0", long, 1)
					must.OK(t, must.Err(from.Write(make([]byte, 2*long))))
					if c.resets {
						must.OK(t, must.Err(from.Write([]byte("short"))))
						_ = from.SetLinger(0)
						_ = from.Close()
					} else {
						_ = from.CloseWrite()
						stop()
						check.Equalf(t, must.Get(io.Copy(io.Discard, to))(t), 2*long, "bytes")
						_ = to.Close()
						_ = from.SetDeadline(time.Now().Add(patience))
						_, _ = io.Copy(io.Discard, from)
						_ = from.Close()
					}
					wait.True(t, "the record", func() bool { return len(n.taken()) == 1 })
					if r := n.taken()[0]; r.End != c.ends[side] {
						t.Errorf("%+v", r)
					}
					_, err = to.Read(make([]byte, 1))
					if c.resets && err == nil || err == io.EOF && c.resets {
						t.Errorf("the other side reads: %v", err)
					}
				})
			})
		}
	}
}

// The end that another end acknowledges came first, also if it lay behind a gap until then.
func TestEndThatIsAcknowledgedCameFirst(t *testing.T) {
	t.Parallel()
	for side, want := range []conntrack.End{conntrack.ClientFin, conntrack.EndpointFin} {
		t.Run(want.String(), func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 1)
			done := make(chan struct{})
			lab.Backends[0].ServeTCP(t, ":8080", func(*net.TCPConn) { <-done })
			defer close(done)
			n := newNode(t, lab, nil)
			n.serve(0)
			conn := must.Get(lab.Client.Dial("tcp", vip4+":80"))(t)
			defer conn.Close()
			wait.True(t, "the client has completed the handshake", func() bool {
				return n.hasOpenFlow() && n.openFlow().Seen&bpf.KernelSeenCONFIRMED != 0
			})
			k, client := n.openFlow(), netip.MustParseAddrPort(conn.LocalAddr().String())
			hosts, end := [2]*netns.Host{lab.Client, lab.Backends[0]}, [2]uint32{k.Way[0].End, k.Way[1].End}
			from, to := [2]netip.AddrPort{client, at(lab.Backends[0].IPv4, 8080)}, [2]netip.AddrPort{netip.MustParseAddrPort(vip4 + ":80"), client}
			send := func(i int, sequence, ack uint32) { // an end, behind a byte
				sendSegment(t, hosts[i], from[i], to[i], sequence, ack, flagFIN|flagACK)
			}
			const gap, length = 10, 2
			first, second := side, 1-side
			send(first, end[first]+gap, end[second])
			wait.True(t, "the first end", func() bool { return atomic.LoadUint32(&k.Fin[first]) == end[first]+gap+length })
			send(second, end[second], end[first]+gap+length)
			wait.True(t, "the second end", func() bool { return atomic.LoadUint32(&k.Fin[second]) == end[second]+length })
			sendSegment(t, hosts[first], from[first], to[first], end[first]+gap+length, end[second]+length, flagACK)
			wait.True(t, "the record", func() bool { return n.endedBy(want) == 1 })
		})
	}
}

// A client's RST may pass BPF before data that another CPU handles, and reach the endpoint after it.
// The connection ends for BPF too, even if no process ran that could challenge the client.
func TestResetBeforeItsDataIsSeen(t *testing.T) {
	t.Parallel()
	for _, away := range []bool{false, true} {
		t.Run(fmt.Sprint("away ", away), func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 2)
			accepted, done := make(chan *net.TCPConn, 1), make(chan struct{})
			lab.Backends[0].ServeTCP(t, ":8080", func(c *net.TCPConn) {
				accepted <- c
				<-done
			})
			defer close(done)
			root := netns.MountBPF(t)
			n := newNode(t, lab, func(o *Options) { o.BPFRoot, o.Name, o.Keep = root, "test", away })
			n.serve(0)
			conn := must.Get(lab.Client.Dial("tcp", vip4+":80"))(t)
			to := <-accepted
			_ = to.SetDeadline(time.Now().Add(patience))
			wait.True(t, "the flow is open", n.hasOpenFlow)
			k, client := n.openFlow(), netip.MustParseAddrPort(conn.LocalAddr().String())
			sequence, ack := k.Way[0].End, k.Way[1].End

			// The node sees none of the bytes; the endpoint gets each from somebody else.
			const empty, data = 66, "xxx"
			lab.Client.Lose(t, "eth0", empty, 1)
			must.OK(t, must.Err(io.WriteString(conn, data)))
			for i := range uint32(len(data)) {
				sendSegment(t, lab.Backends[1], client, at(lab.Backends[0].IPv4, 8080), sequence+i, ack, flagACK)
			}
			must.OK(t, must.Err(io.ReadFull(to, make([]byte, len(data)))))
			if away {
				n.leave()
			}
			_ = conn.(*net.TCPConn).SetLinger(0)
			_ = conn.Close()
			if _, err := to.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
				t.Fatal(err)
			}
			if away {
				n = newNode(t, lab, func(o *Options) { o.BPFRoot, o.Name = root, "test" })
				n.serve(0)
			}
			wait.True(t, "the record", func() bool { return len(n.taken()) == 1 })
			if r := n.taken()[0]; r.End != conntrack.ClientReset {
				t.Errorf("%+v", r)
			}
		})
	}
}
