package bind

import (
	"os"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

func TestMain(m *testing.M) { os.Exit(netns.Main(m)) }

func optionsOf(node *netns.Host) Options {
	return Options{Routes: route.Options{NetNS: node.FD()}, ReplyPorts: [2]uint16{61000, 65534}}
}

func TestSteering(t *testing.T) {
	steering.Run(t, steering.Mode{
		Uncounted: true,
		New: func(t testing.TB, node *netns.Host) redirect.Redirector {
			return must.Get(New(optionsOf(node)))(t)
		},
		Kill: func(_ testing.TB, r redirect.Redirector) {
			r.(*Redirector).Touched = false
			_ = r.Close()
		},
		Cleanup:            func(node *netns.Host) ([]string, error) { return route.Cleanup(optionsOf(node).Routes) },
		UnallocatedRefuses: true,
		Unshielded:         true,
		NonLocalSilent:     true,
		LingeringStays:     true,
	})
}

// Ports that the node's own connections may have are not taken from them, and it
// is said why.
func TestReplyPortsThatAreInUse(t *testing.T) {
	lab := netns.NewLab(t, 0)
	for _, c := range []struct {
		own  string // net.ipv4.ip_local_port_range
		want bool
	}{{"32768 60999", true}, {"32768 61000", false}, {"1024 65535", false}} {
		must.OK(t, lab.Node.SetSysctl("net/ipv4/ip_local_port_range", c.own))
		r := must.Get(New(optionsOf(lab.Node)))(t)
		got := r.Traits().Replies
		if got.Diverted != c.want || (got.Why == "") != c.want {
			t.Errorf("local ports %s: %+v", c.own, got)
		}
		check.OK(t, r.Apply(steering.Plan()))
		if lines, err := r.Router.Dump(); err != nil || strings.Contains(strings.Join(lines, "\n"), " dport ") != c.want {
			t.Errorf("local ports %s: %q, %v", c.own, lines, err)
		}
		check.OK(t, r.Close())
	}
}
