package e2e

import (
	"errors"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"

	neighbours "github.com/sluice-proxy/sluice/test/bench/world"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Beside the rules of the kubelet and of CNI plugins, the kernel forwards connections of the node's own
// clients, in each mode. With netfilter, connection tracking knows nothing of them.
func TestNodeClientsBesideTheKubeletsRules(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("iptables-nft-restore"); err != nil {
		t.Skip("SKIP-NEEDS: iptables-nft-restore")
	}
	forModes(t, func(t *testing.T, m mode) {
		if m.programs == "legacy" {
			return // the mode's own tables have them relayed
		}
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoTCP(t, 8080)
		cmd := lab.Node.Command(t, "iptables-nft-restore", "--noflush")
		cmd.Stdin = strings.NewReader(neighbours.Rules("10.2.0.0/16", lab.Backends[0].IPv4.String()))
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("iptables-nft-restore: %v: %s", err, out)
		}
		p := newProxy(t, lab.Node)
		p.mode = m
		p.apply(webOn(lab))
		p.start("--datapath", "kernel")
		wait.For(t, "the kernel forwards the node's own clients", startTimeout, func() error {
			all, err := p.metrics()
			series := slices.Collect(maps.Keys(all))
			if err == nil && !slices.ContainsFunc(series, func(s string) bool { return strings.HasPrefix(s, `sluice_node_clients_data_path{path="kernel"`) }) {
				err = errors.New(strings.Join(slices.DeleteFunc(series, func(s string) bool { return !strings.HasPrefix(s, "sluice_node_clients") }), " "))
			}
			return err
		})
		before := lab.Node.Tracked(t)
		const connections = 20
		for range connections {
			must.Equal(t, must.Get(lab.Node.Ask("tcp", vip4+":80"))(t), "b1:8080")
		}
		if after := lab.Node.Tracked(t); after > before && !m.lacks(untracked) {
			t.Errorf("%d connections are tracked, %d were before", after, before)
		}
		for _, r := range p.awaitRecords(connections) {
			check.Equalf(t, r.Path, "kernel", "the path")
		}
		p.stop()
	})
}
