package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestHeldConnections: 200 clients connect to a Service without endpoints that holds them,
// and all are answered once it has one. Those of a Service that stays without end by its
// annotation, and one without the annotation refuses.
func TestHeldConnections(t *testing.T) {
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			const clients = 200
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			p := newProxy(t, lab.Node)
			s := webService{name: "web", vips: []string{vip4, vip6}, port: 80}
			p.write("web.yaml", s.annotated("sluice.dev/hold: 10m"))
			short := webService{name: "short", vips: []string{"10.96.0.11"}, port: 80}
			p.write("short.yaml", short.annotated("sluice.dev/hold: 1s"))
			p.apply(webService{name: "none", vips: []string{"10.96.0.12"}, port: 80})
			p.start("--datapath", path)

			if _, err := lab.Client.Ask("tcp", "10.96.0.12:80"); err == nil || !strings.Contains(err.Error(), "refused") {
				t.Errorf("without the annotation: %v", err)
			}
			if server, err := lab.Client.Ask("tcp", "10.96.0.11:80"); err == nil {
				t.Errorf("%q answers in place of no endpoint", server)
			}
			targets := addresses(80, vip4, vip6)
			answered, ends := make(chan []visit), make([]time.Time, clients)
			go func() {
				answered <- crowd(clients, clients, func(i int) visit {
					v := ask(lab.Client, targets[i%2])
					ends[i] = time.Now()
					return v
				})
			}()
			wait.For(t, "held connections", stopTimeout, func() error {
				values, err := p.metrics()
				if err == nil && values["sluice_connections_held"] != clients {
					err = fmt.Errorf("%v are held", values["sluice_connections_held"])
				}
				return err
			})
			if !p.stderr.Contains("connections wait for endpoints, up to 10m0s") {
				t.Error("the log does not say that endpoints are needed")
			}
			p.awaitTold(lab, vip4, "connections, for an endpoint")
			began := time.Now()
			s.endpoints = on(8080, lab.Backends...)
			p.write("web.yaml", s.annotated("sluice.dev/hold: 10m"))
			for _, v := range <-answered {
				if v.err != nil {
					t.Error(v.err)
				}
			}
			slices.SortFunc(ends, time.Time.Compare)
			after := func(i int) time.Duration { return ends[i].Sub(began).Round(time.Millisecond) }
			t.Logf("after the manifest of the first endpoint was written, the first client is answered in %v, half of %d in %v, all in %v", after(0), clients, after(clients/2), after(clients-1))
			held := 0
			for _, r := range p.awaitRecords(clients + 1) {
				switch {
				case r.Service == "default/short:http":
					if r.End != "no_endpoints" || r.Attempts != 0 {
						t.Errorf("a client that no endpoint came for: end %s, %d attempts", r.End, r.Attempts)
					}
					if us := time.Second.Microseconds(); r.WaitedUS < us/2 || r.WaitedUS > r.DurationUS {
						t.Errorf("a client that is held for 1s and lasts %d us waited %d us", r.DurationUS, r.WaitedUS)
					}
				case r.Path != "relay" || r.Attempts < 1 || !slices.Contains([]string{"client_fin", "endpoint_fin"}, r.End):
					t.Errorf("a held client: path %s, %d attempts, end %s", r.Path, r.Attempts, r.End)
				case r.ConnectUS == nil || r.WaitedUS <= 0 || r.WaitedUS >= *r.ConnectUS:
					t.Errorf("a held client waited %d us; its record has %+v", r.WaitedUS, r)
				default:
					held++
				}
			}
			if held != clients {
				t.Errorf("%d records of %d clients", held, clients)
			}
			p.stop()
		})
	}
}
