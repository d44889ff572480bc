package e2e

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// refuse has a host refuse new connections to a port at once, as a pod does whose program has
// ended. What it has accepted goes on. back undoes it.
func refuse(t *testing.T, h *netns.Host, port string) {
	t.Helper()
	nft(t, h, "table inet ended { chain input { type filter hook input priority 0; tcp dport "+port+" tcp flags & (syn|ack) == syn reject with tcp reset; }; }")
}

func back(t *testing.T, h *netns.Host) {
	t.Helper()
	nft(t, h, "delete table inet ended")
}

func nft(t *testing.T, h *netns.Host, script string) {
	t.Helper()
	cmd := h.Command(t, "nft", "-f", "-")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("nft: %v\n%s", err, out)
	}
}

// TestRolloutFailsNoConnection replaces three pods by three others ten times, one after another,
// while 500 clients connect each second. Each old pod refuses before the manifest says that it
// has gone. No connection fails.
func TestRolloutFailsNoConnection(t *testing.T) {
	onPaths(t, func(t *testing.T, path string) {
		const rollouts, pods = 10, 3
		lab := netns.NewLab(t, 2*pods)
		for _, b := range lab.Backends {
			b.EchoTCP(t, 8080)
		}
		p := newProxy(t, lab.Node)
		web := webService{name: "web", vips: []string{vip4}, port: 80}
		running, next := lab.Backends[:pods:pods], lab.Backends[pods:]
		put := func(hosts []*netns.Host) {
			web.endpoints = on(8080, hosts...)
			p.apply(web)
		}
		put(running)
		p.start("--datapath", path, promptDials)
		clients := arrive(t, lab.Client, netip.MustParseAddrPort(addresses(80, vip4)[0]), 500)
		more := func(n int64) {
			t.Helper()
			want := clients.served.Load() + n
			wait.True(t, "clients are served", func() bool { return clients.served.Load() >= want })
		}
		more(100)
		began := time.Now()
		for range rollouts {
			var ended []*netns.Host
			for _, pod := range next {
				running = append(running, pod)
				put(running)
				more(25)
				refuse(t, running[0], "8080")
				ended, running = append(ended, running[0]), slices.Clone(running[1:])
				put(running)
				more(25)
			}
			for _, pod := range ended {
				back(t, pod)
			}
			next = ended
		}
		took := time.Since(began)
		all := clients.end()
		failed := 0
		for _, c := range all {
			if c.err != nil {
				if failed++; failed <= 5 {
					t.Errorf("%s: %v", c.client, c.err)
				}
			}
		}
		refused, other := 0, 0
		for _, r := range p.awaitRecords(len(all)) {
			if r.Path != path {
				other++
			}
			if r.Attempts > 1 {
				refused++
			}
		}
		t.Logf("%d of %d connections failed in %d rollouts, %.1f s; %d were refused by a pod that had ended, and got another one", failed, len(all), rollouts, took.Seconds(), refused)
		if refused == 0 {
			t.Error("no pod refused: the test proves nothing")
		}
		if other > 0 {
			t.Errorf("%d connections have another data path", other)
		}
		p.stop()
	})
}
