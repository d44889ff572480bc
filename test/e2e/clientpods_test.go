package e2e

import (
	"fmt"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestClientsPodsAreNamed: a pod of a Service is the client of a Service, and a host is.
// Lists, records and the story have the pod's name, and the filter finds its connections
// alone, on both data paths.
func TestClientsPodsAreNamed(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 2)
		lab.Backends[0].EchoTCP(t, 8080)
		p := newProxy(t, lab.Node)
		p.apply(webService{name: "web", vips: []string{vip4}, port: 80, endpoints: on(8080, lab.Backends[0])})
		p.apply(webService{name: "asks", vips: []string{"10.96.0.11"}, port: 80, endpoints: on(8080, lab.Backends[1])})
		p.start("--datapath", path)
		address := addresses(80, vip4)[0]
		for _, h := range []*netns.Host{lab.Client, lab.Backends[1]} {
			must.OK(t, must.Err(h.Ask("tcp", address)))
		}
		hold(t, lab.Client, address, 1)
		open := hold(t, lab.Backends[1], address, 1)[0].LocalAddr().String()
		for _, command := range []string{"conns client_pod=default/asks-1 -o wide", "log client_pod=default/asks-1"} {
			wait.For(t, command, startTimeout, func() error {
				out, err := sluice(t, lab, strings.Fields(command)...)
				if err != nil || strings.Count(out, " default/asks-1 ") != 1 || strings.Contains(out, lab.Client.IPv4.String()+":") {
					return fmt.Errorf("want one row, of the pod: %v\n%s", err, out)
				}
				return nil
			})
		}
		id := fmt.Sprint(awaitListed(t, lab, "client="+open).ID)
		says(t, lab, open+", the pod default/asks-1", "story", id)
	})
}
