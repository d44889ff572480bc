package tproxy

import (
	"fmt"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestConnectionsToEndpointsAreKept where rules look at their state, or on request, with
// all rules and beside a BPF program that finds sockets.
func TestConnectionsToEndpointsAreKept(t *testing.T) {
	for _, c := range []struct {
		name   string
		choice redirect.Conntrack
		lookup bool
	}{
		{"auto", redirect.Automatic, false},
		{"keep", redirect.Keep, false},
		{"beside a program", redirect.Automatic, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			steering.Kept(t, func(t testing.TB, node *netns.Host) redirect.Redirector {
				return newRedirector(t, node, Options{Conntrack: c.choice, Lookup: c.lookup})
			})
		})
	}
}

// TestRulesAboutStateAreNoticed while the program runs: the table is filled anew, once, and
// not taken for a repair. With --conntrack=bypass it stays as it was.
func TestRulesAboutStateAreNoticed(t *testing.T) {
	for _, choice := range []redirect.Conntrack{redirect.Automatic, redirect.Bypass} {
		t.Run(string(choice), func(t *testing.T) {
			lab := netns.NewLab(t, 0)
			r := newRedirector(t, lab.Node, Options{Conntrack: choice})
			apply(t, r, steering.Plan())
			lab.Node.TrackConnections(t) // a rule that decides nothing
			verify := func() {
				t.Helper()
				if repaired, err := r.Verify(); repaired || err != nil {
					t.Errorf("verify: %v, %v", repaired, err)
				}
			}
			verify()
			if why, kept := r.tracking.Kept(); kept || r.filter.numbers.kept {
				t.Errorf("kept because of %q", why)
			}
			cmd := lab.Node.Command(t, "nft", "add rule inet track input ct state invalid drop")
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			verify()
			if choice == redirect.Automatic {
				// It does not look at the rules again at once.
				wait.For(t, "connections are kept in connection tracking", patience, func() error {
					verify()
					if why, kept := r.tracking.Kept(); !kept || !r.filter.numbers.kept || why != "chain input of the nftables table track" {
						return fmt.Errorf("kept %v, because of %q", kept, why)
					}
					return nil
				})
			}
			if _, kept := r.tracking.Kept(); kept != (choice == redirect.Automatic) || kept != r.filter.numbers.kept {
				t.Errorf("kept %v", kept)
			}
			verify()
		})
	}
}
