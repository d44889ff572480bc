package e2e

import (
	"fmt"
	"io"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// changeBound is the bound on the time until a changed manifest is in force.
const changeBound = 100 * time.Millisecond

// A bound is tried at least leastRounds times, and at most mostRounds times, until
// it was met in leastRounds of them. This tolerates other work of the test
// machine, but not a wait in the proxy, which would occur every time.
const leastRounds, mostRounds = 3, 50

// bound is the time that something took in each round, and its limit.
type bound struct {
	what string
	most time.Duration
	took []time.Duration
}

func (b *bound) add(since time.Time) { b.took = append(b.took, time.Since(since)) }

// enough tells whether the bounds were met often enough. After too many rounds it
// returns an error.
func enough(t *testing.T, bounds ...*bound) bool {
	t.Helper()
	all, last := true, false
	for _, b := range bounds {
		kept := 0
		for _, took := range b.took {
			if took <= b.most {
				kept++
			}
		}
		all, last = all && kept >= leastRounds, last || len(b.took) >= mostRounds
	}
	if !all && !last {
		return false
	}
	for _, b := range bounds {
		slices.Sort(b.took)
		t.Logf("%s: %v", b.what, b.took)
		if !all && b.took[leastRounds-1] > b.most {
			t.Errorf("%s: took more than %v, but for %d times of %d", b.what, b.most, leastRounds-1, len(b.took))
		}
	}
	return true
}

// TestEveryFamilyFromEverywhere connects from another host, from the node itself
// and from a host that is also an endpoint, over IPv4 and IPv6.
func TestEveryFamilyFromEverywhere(t *testing.T) {
	t.Parallel()
	forModes(t, playEveryFamily)
}

func playEveryFamily(t *testing.T, m mode) {
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	startMode(t, lab, m, []webService{webOn(lab)})
	for _, from := range []*netns.Host{lab.Client, lab.Node, lab.Backends[0]} {
		for _, address := range addresses(80, vip4, vip6) {
			seen := map[string]int{}
			for range 4 {
				name, err := from.Ask("tcp", address)
				check.OKf(t, err, "%s to %s", from.Name(), address)
				seen[name]++
			}
			if forwarded() && from == lab.Backends[0] && seen["b1:8080"] > 0 && seen["b2:8080"] > 0 {
				continue // docs/datapath.md: turns of clients that are endpoints
			}
			if seen["b1:8080"] != 2 || seen["b2:8080"] != 2 {
				t.Errorf("%s to %s: got %v, want each endpoint twice in turn", from.Name(), address, seen)
			}
		}
	}
}

// TestEndpointGoneKeepsItsConnections removes an endpoint from the manifests and
// adds it again while connections to it are open. They must continue (A8.1).
func TestEndpointGoneKeepsItsConnections(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	all := webOn(lab)
	p := startProxy(t, lab, []webService{all})
	fewer := all
	fewer.endpoints = on(8080, lab.Backends[0])
	target := addresses(80, vip4)[0]

	avoided := &bound{what: "from the manifest's change until new connections avoid the endpoint", most: changeBound}
	for !enough(t, avoided) {
		// Connections to both endpoints that stay open during the change.
		for range 2 {
			c := lab.Client.Connect(t, "tcp", target)
			name := must.Get(netns.AskOn(c))(t)
			defer func() {
				check.OKf(t, must.Err(io.WriteString(c, "x")), "a connection to %s was cut", name)
				check.OKf(t, must.Err(io.ReadFull(c, make([]byte, 1))), "a connection to %s was cut", name)
			}()
		}
		changed := time.Now()
		p.apply(fewer)
		wait.For(t, "new connections avoid the endpoint that is gone", startTimeout, func() error {
			return onlyOn(lab.Client, target, "b1:8080")
		})
		avoided.add(changed)
		p.apply(all)
		wait.For(t, "the endpoint that is back is used", startTimeout, func() error {
			for range 2 {
				if name, err := lab.Client.Ask("tcp", target); err != nil || name == "b2:8080" {
					return err
				}
			}
			return errNotYet
		})
	}
}

// onlyOn makes enough connections to show that the other endpoint gets none.
func onlyOn(from *netns.Host, address, want string) error {
	for range 3 {
		name, err := from.Ask("tcp", address)
		if err != nil {
			return err
		}
		if name != want {
			return fmt.Errorf("got %s, want %s", name, want)
		}
	}
	return nil
}

// TestPromise4_PortWithNoEndpointsRefuses also runs a server of the node on the
// same port of every address. It must never answer for a VIP.
func TestPromise4_PortWithNoEndpointsRefuses(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	lab.Node.EchoTCP(t, 80)
	full := webOn(lab)
	empty := full
	empty.endpoints = nil
	p := startProxy(t, lab, []webService{full})
	everywhere := []*netns.Host{lab.Client, lab.Node}

	refusing := &bound{what: "from the last endpoint's end until connect is refused", most: changeBound}
	answering := &bound{what: "from the first endpoint until it answers", most: changeBound}
	for !enough(t, refusing, answering) {
		for _, address := range addresses(80, vip4, vip6) {
			for _, from := range everywhere {
				if name, err := from.Ask("tcp", address); err != nil || name != "b1:8080" {
					t.Errorf("%s to %s: got %q, %v", from.Name(), address, name, err)
				}
			}
		}
		changed := time.Now()
		p.apply(empty)
		for _, address := range addresses(80, vip4, vip6) {
			for _, from := range everywhere {
				wait.For(t, from.Name()+" is refused by "+address, startTimeout, func() error { return refused(from, address) })
			}
		}
		refusing.add(changed)
		changed = time.Now()
		p.apply(full)
		wait.For(t, "it answers again", startTimeout, func() error {
			_, err := lab.Client.Ask("tcp", addresses(80, vip4)[0])
			return err
		})
		answering.add(changed)
	}

	p.remove(full.name)
	for _, address := range addresses(80, vip4, vip6) {
		for _, from := range everywhere {
			wait.For(t, "nobody answers "+from.Name()+" for the deleted service", startTimeout, func() error { return unanswered(from, address) })
		}
	}
}

// TestPromise4_PortWhosePolicyLeavesNoneHereDrops has a service with internal
// policy Local whose endpoints are all on another node (A3.5).
func TestPromise4_PortWhosePolicyLeavesNoneHereDrops(t *testing.T) {
	t.Parallel()
	forModes(t, playSilentPort)
}

func playSilentPort(t *testing.T, m mode) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	if !m.lacks(takenPorts) {
		lab.Node.EchoTCP(t, 80)
	}
	elsewhere := webOn(lab)
	elsewhere.local = true
	here := elsewhere
	here.node = "node"
	nowhere := elsewhere
	nowhere.endpoints = nil
	p := startMode(t, lab, m, []webService{elsewhere})
	for _, step := range []struct {
		service webService
		want    func(*netns.Host, string) error
	}{
		{elsewhere, unanswered},
		{here, func(from *netns.Host, address string) error { return onlyOn(from, address, "b1:8080") }},
		{elsewhere, unanswered},
		{nowhere, refused},
	} {
		p.apply(step.service)
		for _, from := range []*netns.Host{lab.Client, lab.Node} {
			for _, address := range addresses(80, vip4, vip6) {
				wait.For(t, fmt.Sprintf("%s to %s", from.Name(), address), startTimeout, func() error { return step.want(from, address) })
			}
		}
	}
	p.stop()
}

// TestHostsOwnServersStayBehindTheirAddresses has servers of the node listen on
// every address.
func TestHostsOwnServersStayBehindTheirAddresses(t *testing.T) {
	t.Parallel()
	forModes(t, playHostsServers)
}

func playHostsServers(t *testing.T, m mode) {
	if m.lacks(takenPorts) {
		return
	}
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	lab.Node.EchoTCP(t, 80)   // the service's port
	lab.Node.EchoTCP(t, 2222) // a port without a service
	startMode(t, lab, m, []webService{webOn(lab)})
	for _, from := range []*netns.Host{lab.Client, lab.Node} {
		for _, a := range []string{vip4, vip6} {
			if name, err := from.Ask("tcp", addresses(80, a)[0]); err != nil || name != "b1:8080" {
				t.Errorf("%s to the service at %s: got %q, %v", from.Name(), a, name, err)
			}
			// A3.12
			check.OKf(t, refused(from, addresses(2222, a)[0]), "%s to a port without a service at %s", from.Name(), a)
		}
		for _, a := range []netip.Addr{lab.Node.IPv4, lab.Node.IPv6} {
			for _, port := range []uint16{80, 2222} {
				want := fmt.Sprintf("node:%d", port)
				if name, err := from.Ask("tcp", netip.AddrPortFrom(a, port).String()); err != nil || name != want {
					t.Errorf("%s to the node's own %s: got %q, %v", from.Name(), want, name, err)
				}
			}
		}
	}
}
