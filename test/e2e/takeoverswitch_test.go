package e2e

import (
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestTakeOverWithOtherNumbers: a process whose marks, routing tables or reply ports are others begins
// once the running one has ended. It would not bring back what comes for connections of that one: they
// are reset, and none of them hangs.
func TestTakeOverWithOtherNumbers(t *testing.T) {
	for _, flags := range [][2]string{{"--reply-ports", "62000-62031"}, {"--reply-ports", "off"}, {"--reply-mark", "0x4000"}} {
		t.Run(flags[0]+"="+flags[1], func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			p := prepareProxy(t, lab, []webService{webOn(lab)})
			p.start("--datapath", "relay", "--reply-ports", "61000-61031")
			address := addresses(80, vip4)[0]
			held := hold(t, lab.Client, address, 2)
			next := *p
			next.start("--datapath", "relay", "--reply-ports", "61000-61031", flags[0], flags[1], "--take-over")
			p.waitExit()
			if code := p.cmd.ProcessState.ExitCode(); code != 0 || !next.stderr.Contains("the running sluice steers with marks") {
				t.Fatalf("%v: %s", p.cmd.ProcessState, next.stderr)
			}
			for _, c := range held {
				if err := ended(c); !isReset(err) {
					t.Errorf("%s ended with %v, want a reset", c.LocalAddr(), err)
				}
			}
			check.OK(t, must.Err(lab.Client.Ask("tcp", address)))
			next.stop()
		})
	}
}
