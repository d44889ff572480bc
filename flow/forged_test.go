package flow

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/flow/bpf"
	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// An RST that the endpoint does not believe (RFC 5961) cuts no connection that goes on, also
// if BPF, which knows no windows, believes it.
func TestForgedResetCutsNoBusyConnection(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	l := must.Get(lab.Backends[0].Listen("tcp", ":8080"))(t)
	defer l.Close()
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	wait.For(t, "a test that was not stopped itself", 5*time.Minute, func() error { return forgeReset(t, n, l) })
}

// errPaused says that the connection was quiet for longer than the time after which it may be
// cut, as a busy machine did not run the test.
var errPaused = errors.New("paused")

// forgeReset opens a connection, forges an RST, and expects the connection to go on.
func forgeReset(t *testing.T, n *node, l net.Listener) error {
	t.Helper()
	lab, had := n.lab, len(n.taken())
	wait.True(t, "no flow is open", func() bool { return !n.hasOpenFlow() })
	c := must.Get(lab.Client.Dial("tcp", vip4+":80"))(t)
	defer c.Close()
	endpoint := must.Get(l.Accept())(t)
	defer endpoint.Close()
	open := n.openFlow()
	forged := reset{from: bpf.PortOf(open.Client, open.ClientPort), to: bpf.PortOf(open.Vip, open.VipPort), sequence: open.Way[0].End + 1, flags: flagRST}
	last := time.Now() // the connection was in use after it
	must.OK(t, lab.Client.Do(func() error {
		fd, err := sys.RawSender(false)
		if err != nil {
			return err
		}
		defer sys.Close(fd)
		if errno := sys.SendRaw(fd, forged.to.Addr(), forged.append(nil)); errno != 0 {
			return errno
		}
		return nil
	}))
	wait.True(t, "the forged RST was believed", func() bool { return len(n.taken()) > had })
	tick := time.NewTicker(linger / 8)
	defer tick.Stop()
	for began := time.Now(); time.Since(began) < 2*linger; <-tick.C {
		now := time.Now()
		_, err := io.WriteString(c, "x")
		if time.Since(last) >= linger-clockTick {
			return errPaused
		}
		_ = endpoint.SetDeadline(time.Now().Add(patience))
		if err == nil {
			_, err = io.ReadFull(endpoint, make([]byte, 1))
		}
		must.OKf(t, err, "%v after the forged RST", time.Since(began))
		last = now
	}
	return nil
}

// What the node's own rules drop ends no connection, even if it has the numbers that the endpoint
// expects: not by an RST, nor by a FIN.
func TestDroppedPacketsEndNoConnection(t *testing.T) {
	t.Parallel()
	for _, hidden := range []bool{false, true} {
		forDeciders(t, func(t *testing.T, by func(*Options)) {
			lab := netns.NewLab(t, 2)
			lab.Backends[0].EchoTCP(t, 8080)
			lab.Node.NFT(t, fmt.Sprintf("add table inet guard; add chain inet guard raw { type filter hook prerouting priority raw; }; add rule inet guard raw iifname != client ip saddr %s counter drop", lab.Client.IPv4))
			n := newNode(t, lab, by)
			n.config.MasqueradeAll = hidden
			n.serve(0)
			c := must.Get(lab.Client.Dial("tcp", vip4+":80"))(t)
			defer c.Close()
			must.OK(t, must.Err(netns.AskOn(c)))
			client, vip := netip.MustParseAddrPort(c.LocalAddr().String()), netip.MustParseAddrPort(vip4+":80")
			k := n.openFlow()
			had := n.server.Stats().Kernel["translated"]
			flags := []byte{flagRST, flagRST | flagACK, flagACK | 1, flagACK} // 1 is FIN
			for _, f := range flags {
				sendSegment(t, lab.Backends[1], client, vip, k.Way[0].End, k.Way[1].End, f)
			}
			wait.True(t, "all segments", func() bool { return n.server.Stats().Kernel["translated"] >= had+uint64(len(flags)) })
			const ends = bpf.KernelSeenCLIENT_FIN | bpf.KernelSeenCLIENT_RST | bpf.KernelSeenCLOSING_TOLD
			if k.State != bpf.KernelStateOPEN || k.Seen&ends != 0 || len(n.taken()) != 0 {
				t.Errorf("hidden %v: the flow is in state %d, seen %#x, records: %+v", hidden, k.State, k.Seen, n.taken())
			}
			back := make([]byte, 6)
			_ = c.SetDeadline(time.Now().Add(patience))
			if _, err := io.WriteString(c, "again\n"); err != nil {
				t.Errorf("hidden %v: %v", hidden, err)
			} else if _, err := io.ReadFull(c, back); err != nil || string(back) != "again\n" {
				t.Errorf("hidden %v: %q, %v", hidden, back, err)
			}
			_ = c.Close()
			wait.True(t, "a record", func() bool { return len(n.taken()) == 1 })
			if r := n.taken()[0]; r.End != conntrack.ClientFin {
				t.Errorf("hidden %v: %+v", hidden, r)
			}
		})
	}
}

// openFlow returns an open flow.
func (n *node) openFlow() *bpf.KernelFlow {
	n.t.Helper()
	for i := range n.server.kernel.Flows {
		if k := &n.server.kernel.Flows[i]; k.State == bpf.KernelStateOPEN {
			return k
		}
	}
	n.t.Fatal("no flow is open")
	return nil
}
