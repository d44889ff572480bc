package datagram

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/bind"
	"github.com/sluice-proxy/sluice/redirect/route"
	"github.com/sluice-proxy/sluice/redirect/sklookup"
	"github.com/sluice-proxy/sluice/redirect/tproxy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
	"github.com/sluice-proxy/sluice/test/wait"
)

// ways are the steering modes.
var ways = []struct {
	name string
	make func(route.Options) (redirect.Redirector, error)
}{
	{"tproxy", func(o route.Options) (redirect.Redirector, error) {
		return tproxy.New(tproxy.Options{Routes: route.Options{NetNS: o.NetNS}})
	}},
	{"sklookup", func(o route.Options) (redirect.Redirector, error) {
		return sklookup.New(sklookup.Options{Routes: o, ReplyPorts: [2]uint16{61000, 65534}})
	}},
	{"bind", func(o route.Options) (redirect.Redirector, error) {
		return bind.New(bind.Options{Routes: o, ReplyPorts: [2]uint16{61000, 65534}})
	}},
}

// Whatever steers: clients near and far are served by both loops, endpoints see
// the clients' own addresses, ports within the range of replies too, an endpoint
// that goes is followed by another, and none at all refuses.
func TestEveryWayOfSteering(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			lab := netns.NewLab(t, 2)
			steer := must.Get(way.make(route.Options{NetNS: lab.Node.FD()}))(t)
			counted := &steering.Counted{Redirector: steer}
			n := newNodeBy(t, lab, counted, nil)
			n.host = hostnet.NewAddresses([]netip.Addr{lab.Node.IPv4, lab.Node.IPv6})
			one, two := lab.Backends[0], lab.Backends[1]
			one.WitnessUDP(t, 5300)
			two.WitnessUDP(t, 5300)
			for _, port := range []int32{53, 12345} {
				four := svc(fmt.Sprint("four-", port), vip4, nil, at(one.IPv4, 5300))
				six := svc(fmt.Sprint("six-", port), vip6, nil, at(one.IPv6, 5300))
				four.Services[0].Spec.Ports[0].Port, six.Services[0].Spec.Ports[0].Port = port, port
				n.apply(four)
				n.apply(six)
				for _, from := range []*netns.Host{lab.Client, lab.Node} {
					for _, vip := range []string{vip4, vip6} {
						to := netip.AddrPortFrom(netip.MustParseAddr(vip), uint16(port)).String()
						for range 8 {
							c := client(t, from, to)
							for range 3 {
								got, err := ask(c, "q", patience)
								if err != nil || !strings.HasPrefix(got, "b1:5300 ") {
									t.Fatalf("%s asks %s: %q, %v", from.Name(), to, got, err)
								}
								local := netip.MustParseAddrPort(c.LocalAddr().String()).Addr()
								seen := netip.MustParseAddrPort(strings.TrimSuffix(strings.TrimPrefix(got, "b1:5300 "), "\nq")).Addr()
								if from == lab.Client && seen != local {
									t.Errorf("the endpoint sees %s, want the client's %s", seen, local)
								}
							}
						}
					}
				}
			}
			c := client(t, lab.Client, vip4+":53")
			must.OK(t, must.Err(ask(c, "q", patience)))
			n.apply(service.Change{EndpointSlices: endpointSlices("four-53", vip4, at(two.IPv4, 5300))})
			if got, err := ask(c, "q", patience); err != nil || !strings.HasPrefix(got, "b2:5300 ") {
				t.Errorf("after its endpoint went: %q, %v", got, err)
			}
			if steer.Traits().BindEach {
				n.server.Unbind(service.Destination{Addr: netip.MustParseAddr(vip4), Port: 53, Protocol: service.UDP})
			}
			n.apply(service.Change{EndpointSlices: endpointSlices("four-53", vip4)})
			wait.True(t, "a refusal", func() bool {
				_, err := ask(c, "q", patience)
				return errors.Is(err, syscall.ECONNREFUSED)
			})
			used := 0
			for i := range loops {
				done := make(chan int)
				n.loops[i].Post(func() { done <- n.server.workers[i].count })
				if <-done > 0 {
					used++
				}
			}
			check.Equalf(t, used, loops, "loops have sessions")
			n.stop()
			byClient := steer.Traits().Replies.Clients != nil
			if held, open := counted.Held.Load(), counted.Open.Load(); byClient != (held > 0) || open != 0 {
				t.Errorf("clients were held for %d sessions, and are for %d that have ended", held, open)
			}
			for _, r := range n.records.All() {
				if want := policy.SourceClient; r.Client.Addr() == lab.Client.IPv4 && r.Source != want {
					t.Errorf("record says source=%s, want %s", r.Source, want)
				}
			}
		})
	}
}
