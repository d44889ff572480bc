package e2e

import (
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestStarted: sluice started succeeds where the proxy can be seen, and not where it is of another container,
// nor when there is none.
func TestStarted(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	apart := func() error {
		return lab.Node.Command(t, "unshare", "--pid", "--fork", "--mount-proc", built(t), "started").Run()
	}
	here := func() error { return lab.Node.Command(t, built(t), "started").Run() }
	check.Errorf(t, here(), "exit status 1", "without a proxy")
	p := startProxy(t, lab, nil, "--nft-table", "other")
	check.OKf(t, here(), "beside the proxy")
	check.Errorf(t, apart(), "exit status 1", "in another PID namespace")
	p.stop()
	check.Errorf(t, here(), "exit status 1", "without a proxy")
}
