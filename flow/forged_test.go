package flow

import (
	"io"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// An RST that the endpoint does not believe (RFC 5961) cuts no connection that goes on, also
// if BPF, which knows no windows, believes it.
func TestForgedResetCutsNoBusyConnection(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	c, err := lab.Client.Dial("tcp", vip4+":80")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := netns.AskOn(c); err != nil {
		t.Fatal(err)
	}
	var open *kernelFlow
	for i := range n.server.kernel.flows {
		if k := &n.server.kernel.flows[i]; k.State == kernelStateOPEN {
			open = k
		}
	}
	if open == nil {
		t.Fatal("no flow is open")
	}
	forged := reset{from: portOf(open.Client, open.ClientPort), to: portOf(open.Vip, open.VipPort), sequence: open.Way[0].End + 1, flags: flagRST}
	if err := lab.Client.Do(func() error {
		fd, err := sys.RawSender(false)
		if err != nil {
			return err
		}
		defer sys.Close(fd)
		if errno := sys.SendRaw(fd, forged.to.Addr(), forged.append(nil)); errno != 0 {
			return errno
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	wait.True(t, "the forged RST was believed", func() bool { return len(n.taken()) == 1 })
	tick := time.NewTicker(linger / 8)
	defer tick.Stop()
	for began := time.Now(); time.Since(began) < 2*linger; <-tick.C {
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := io.WriteString(c, "x"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Fatalf("%v after the forged RST: %v", time.Since(began), err)
		}
	}
}
