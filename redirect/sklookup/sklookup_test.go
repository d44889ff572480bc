package sklookup

import (
	"errors"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/tproxy"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

func optionsOf(node *netns.Host) Options {
	return Options{Routes: route.Options{NetNS: node.FD()}, ReplyPorts: [2]uint16{61000, 65534}}
}

// newRedirector makes one inside the node; the test closes it.
func newRedirector(t testing.TB, node *netns.Host) *Redirector {
	t.Helper()
	return must.Get(New(optionsOf(node)))(t)
}

// onNodes plays the scenes on a node without a BPF file system, and on one that has
// it. Scenes wait most of the time, so that nodes of several tests play them at once.
func onNodes(t *testing.T, mode func(root string) steering.Mode) {
	t.Parallel()
	t.Run("without pins", func(t *testing.T) { t.Parallel(); steering.Run(t, mode("")) })
	t.Run("with pins", func(t *testing.T) { t.Parallel(); steering.Run(t, mode(netns.MountBPF(t))) })
}

func TestSteering(t *testing.T) {
	onNodes(t, func(root string) steering.Mode {
		return steering.Mode{
			New: func(t testing.TB, node *netns.Host) redirect.Redirector { return newPinned(t, node, root) },
			Kill: func(_ testing.TB, r redirect.Redirector) {
				kill(r.(*Redirector))
			},
			Cleanup: func(node *netns.Host) ([]string, error) {
				pins, err := Cleanup(pinnedOptions(node, root))
				routes, routesErr := route.Cleanup(optionsOf(node).Routes)
				return append(pins, routes...), errors.Join(err, routesErr)
			},
			NonLocalSilent: true,
			LingeringStays: true,
		}
	})
}

func pinnedOptions(node *netns.Host, root string) Options {
	o := optionsOf(node)
	o.BPFRoot, o.Name = root, "sluice"
	return o
}

// newPinned makes one that pins its program; the test closes it.
func newPinned(t testing.TB, node *netns.Host, root string) *Redirector {
	t.Helper()
	return must.Get(New(pinnedOptions(node, root)))(t)
}

// kill does what the end of a process does: it closes descriptors.
func kill(r *Redirector) {
	r.Touched = false
	_ = r.Close()
}

// besideOptions are those of nftables that stands beside the program.
func besideOptions(node *netns.Host) tproxy.Options {
	return tproxy.Options{Routes: route.Options{NetNS: node.FD()}, Lookup: true}
}

// newBeside makes both inside the node; the test closes them.
func newBeside(t testing.TB, node *netns.Host) *Redirector {
	t.Helper()
	return newPinnedBeside(t, node, "")
}

func newPinnedBeside(t testing.TB, node *netns.Host, root string) *Redirector {
	t.Helper()
	side := must.Get(tproxy.New(besideOptions(node)))(t)
	r, err := New(Options{Routes: route.Options{NetNS: node.FD()}, Beside: side, BPFRoot: root, Name: "sluice"})
	if err != nil {
		_ = side.Close()
		t.Fatal(err)
	}
	return r
}

// With nftables beside it, the program has none of the limits that the lack of
// netfilter sets.
func TestSteeringBesideNFTables(t *testing.T) {
	onNodes(t, func(root string) steering.Mode {
		return steering.Mode{
			New: func(t testing.TB, node *netns.Host) redirect.Redirector { return newPinnedBeside(t, node, root) },
			Kill: func(_ testing.TB, r redirect.Redirector) {
				// What the kernel keeps of a killed process is the pin, the table and the routes.
				side := r.(*Redirector).opts.Beside.(*tproxy.Redirector)
				side.Touched = false
				kill(r.(*Redirector))
				_ = side.Close()
			},
			Cleanup: func(node *netns.Host) ([]string, error) {
				pins, err := Cleanup(pinnedOptions(node, root))
				table, tableErr := tproxy.Cleanup(besideOptions(node))
				return append(pins, table...), errors.Join(err, tableErr)
			},
			Renumbers: true, // generations of sets
		}
	})
}

// Replies to clients' addresses cost every packet of the node a policy routing rule, and
// with nftables a chain. Both come with the first socket on such an address. The table
// stays: it refuses once the program has gone with its process (F4).
func TestRepliesCostNothingUntilASocketNeedsThem(t *testing.T) {
	for name, open := range map[string]func(testing.TB, *netns.Host) *Redirector{
		"alone":           func(t testing.TB, node *netns.Host) *Redirector { return newPinned(t, node, "") },
		"beside nftables": newBeside,
	} {
		t.Run(name, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Settle(t)
			r := open(t, lab.Node)
			t.Cleanup(func() { _ = r.Close() })
			replies := r.Traits().Replies
			// As the kernel tells them: a table of nftables, and a rule's RTA_TABLE 8377.
			const table, rule = "\ntable ", "08000f00b9200000"
			apply := func(when string, nodeOnly, want bool) {
				t.Helper()
				p := redirect.Plan{NodeSourceOnly: nodeOnly, Local: redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/16"))}
				must.OK(t, r.Apply(p))
				if repaired, err := r.Verify(); repaired || err != nil {
					t.Fatalf("%s: verify: %v, %v", when, repaired, err)
				}
				made := lab.Node.Dump(t)
				if strings.Contains(made, rule) != want || strings.Contains(made, table) != (name != "alone") {
					t.Errorf("%s: want a rule for replies: %v:\n%s", when, want, made)
				}
			}
			if _, err := replies.Clients.Hold(lab.Client.IPv4); err == nil {
				t.Error("before anything is steered, replies come back")
			}
			apply("before the first socket", false, false)
			ports, err := replies.Clients.Hold(lab.Client.IPv4)
			if want := [2]uint16{replies.FirstPort, replies.LastPort}; err != nil || ports != want {
				t.Errorf("ports of a socket: %d, %v, want %d", ports, err, want)
			}
			apply("with a socket", false, true)
			replies.Clients.Release(lab.Client.IPv4)
			apply("soon after the last socket", false, true)
			apply("with the node's address alone", true, false)
		})
	}
}
