package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestEachDropIsNamed: once the proxy watches what rules drop, it says of each attempt that a rule
// drops that one does. The packet may be dropped at the very beginning of the attempt.
func TestEachDropIsNamed(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		const clients = 8
		lab := netns.NewLab(t, 1)
		lab.Backends[0].EchoTCP(t, 8080)
		lab.Node.NFT(t, "table inet rules {\n chain out { type filter hook output priority 0; tcp dport 8080 drop; }\n chain forward { type filter hook forward priority 0; tcp dport 8080 drop; }\n}")
		startProxy(t, lab, []webService{webOn(lab)}, "--datapath", path, "--dial-timeouts=200ms,300ms")
		// failures returns those of attempts that began after a time.
		failures := func(since time.Time) (all []api.Failure) {
			out, err := sluice(t, lab, "failures", "--each", "--limit", "1000", "-o", "json")
			must.OKf(t, err, "%s", out)
			for line := range strings.Lines(out) {
				var f api.Failure
				must.OK(t, json.Unmarshal([]byte(line), &f))
				if f.Time.Add(-time.Duration(f.US) * time.Microsecond).After(since) {
					all = append(all, f)
				}
			}
			return all
		}
		address := addresses(80, vip4)[0]
		wait.For(t, "a drop is named", startTimeout, func() error {
			turnAway(lab.Client, address)
			all := failures(time.Time{})
			if len(all) == 0 || all[0].Error != "dropped" {
				return fmt.Errorf("%+v", all)
			}
			return nil
		})
		since := time.Now()
		for range clients { // one after the other: an attempt beside others begins late
			_, _ = lab.Client.Ask("tcp", address)
		}
		wait.For(t, "the attempts have failed", startTimeout, func() error {
			if n := len(failures(since)); n < clients {
				return fmt.Errorf("%d", n)
			}
			return nil
		})
		for _, f := range failures(since) {
			if f.Error != "dropped" {
				t.Errorf("an attempt is said to be %s: %+v", f.Error, f)
			}
		}
	})
}
