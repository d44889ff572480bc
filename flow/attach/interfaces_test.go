package attach

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/foreign"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestTunnelGetsItsPrograms: the programs for interfaces without a link header are asked for once there is
// such an interface, and again after an error.
func TestTunnelGetsItsPrograms(t *testing.T) {
	lab := netns.NewLab(t, 1)
	p := foreign.Idle(t)
	var asked atomic.Int32
	is := opened(t, lab.Node, func(o *Options) {
		o.Repair = 10 * time.Millisecond
		o.Bare = func() (Programs, error) {
			if asked.Add(1) == 1 {
				return Programs{}, errors.New("no memory")
			}
			return Programs{Ingress: p, Egress: p}, nil
		}
	})
	check.Equalf(t, asked.Load(), 0, "calls without a tunnel")
	far := lab.AddFarHost(t, "far", 1, netns.Line{MTU: 1400})
	index := lab.Node.Link(t, far.Name()).Attrs().Index
	wait.For(t, "the programs are at the tunnel", patience, func() error {
		if !is.has(index) {
			return fmt.Errorf("not at %d, after %d calls", index, asked.Load())
		}
		return nil
	})
}
