package tproxy

import (
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// silence is how long no answer must come for us to call it silence; answers
// come within a millisecond here, or as soon as a busy machine gets to it, for
// which patience waits.
const silence, patience = 100 * time.Millisecond, 20 * time.Second

// Rules A3.4, A3.5, A3.12, facts F4, F6: what is refused gives ECONNREFUSED to
// connect, what is silent gives nothing, a host's wildcard server is not reachable by a service's address,
// and an address that no service has is silent.
func TestRefusesAndKeepsSilent(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Node.EchoTCP(t, 8080) // a wildcard server of the host
	f := steering.NewFront(t, lab.Node, "front")
	r := newRedirector(t, lab.Node, Options{})
	apply(t, r, steering.Plan(
		steering.Steer(f, tcp("10.96.0.10:80"), tcp("[fd01::10]:80")),
		steering.Refuse(tcp("10.96.0.11:80"), tcp("[fd01::11]:80"), udp("10.96.0.11:53"), udp("[fd01::11]:53"), sctp("10.96.0.11:9")),
		steering.Silent(tcp("10.96.0.12:80"), tcp("[fd01::12]:80")),
	))
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, c := range []struct{ to, want string }{
			{"10.96.0.10:80", "front for 10.96.0.10:80"},
			{"[fd01::10]:80", "front for [fd01::10]:80"},
			{"10.96.0.11:80", "refused"},
			{"[fd01::11]:80", "refused"},
			{"10.96.0.10:8080", "refused"},
			{"[fd01::10]:8080", "refused"},
			{"10.96.0.11:8080", "refused"},
			{"10.96.0.12:8080", "refused"},
			{"10.1.0.1:8080", "node:8080"},
			{"[fd00:1::1]:8080", "node:8080"},
		} {
			steering.Expect(t, from, tcp(c.to), c.want)
		}
		for _, to := range []string{"10.96.0.12:80", "[fd01::12]:80", "10.96.0.99:80", "[fd01::99]:80", "10.96.0.99:8080", "[fd01::99]:8080"} {
			steering.Expect(t, from, tcp(to), steering.Silence)
		}
		for _, to := range []string{"10.96.0.11:53", "[fd01::11]:53", "10.96.0.10:53", "[fd01::10]:53"} {
			check.Equalf(t, askUDP(t, from, to), "refused", "from %s to UDP %s", from.Name(), to)
		}
	}
}

// Fact F10: strict checks of source addresses, which drop redirected packets
// where marks are used, change nothing.
func TestStrictSourceChecks(t *testing.T) {
	lab := netns.NewLab(t, 0)
	for _, key := range []string{"rp_filter", "src_valid_mark"} {
		for _, name := range []string{"all", "default", "client", "lo"} {
			must.OK(t, lab.Node.SetSysctl("net/ipv4/conf/"+name+"/"+key, "1"))
		}
	}
	f := steering.NewFront(t, lab.Node, "front")
	web := tcp("10.96.0.10:80")
	r := newRedirector(t, lab.Node, Options{})
	apply(t, r, steering.Plan(steering.Steer(f, web), steering.Refuse(tcp("10.96.0.11:80"))))
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		steering.Expect(t, from, web, f.Says(web))
		steering.Expect(t, from, tcp("10.96.0.11:80"), "refused")
	}
}
