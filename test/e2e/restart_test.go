package e2e

import (
	"net"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestRestartEndsOpenConnections shows the cost of an update while connections are
// not handed over (docs/operations.md, "Updates"). Open connections end. A client
// that connects between the two processes waits for the second one, or is refused
// if the first was killed. The log says how long that took.
func TestRestartEndsOpenConnections(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	// No host beyond the node has the Services' addresses.
	if out, err := lab.Node.Command(t, administration(t, "ip"), "route", "add", "blackhole", "10.96.0.0/16").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	p := startProxy(t, lab, []webService{webOn(lab)})
	address := addresses(80, vip4)[0]

	held := hold(t, lab.Client, address, 3)
	began := time.Now()
	p.stop()
	for _, c := range held {
		if err := ended(c); !isReset(err) {
			t.Errorf("stopped: %s ended with %v, want a reset", c.LocalAddr(), err)
		}
	}
	check.OKf(t, unanswered(lab.Client, address), "stopped: a new connection")
	early := make(chan error, 1)
	go func() {
		// The pauses between its SYNs double: it may need twice the time of the start.
		c, err := lab.Client.Dialer(&net.Dialer{Timeout: 2 * readyTimeout}, "tcp", address)
		if err == nil {
			_, err = netns.AskOn(c)
			_ = c.Close()
		}
		early <- err
	}()
	p.start()
	t.Logf("stopped: no client was served for %v", time.Since(began))
	check.OKf(t, <-early, "stopped: a client that connected too early")

	held = hold(t, lab.Client, address, 3)
	began = time.Now()
	p.kill()
	for _, c := range held {
		if err := ended(c); !isReset(err) {
			t.Errorf("killed: %s ended with %v, want a reset", c.LocalAddr(), err)
		}
	}
	check.OKf(t, refused(lab.Client, address), "killed: a new connection")
	p.start()
	t.Logf("killed: no client was served for %v", time.Since(began))
	check.OKf(t, must.Err(lab.Client.Ask("tcp", address)), "after the kill")
	p.stop()
}
