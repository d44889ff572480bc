package e2e

import (
	"cmp"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestHeldConnections: 200 clients connect to a Service without endpoints that holds them,
// and all are answered within 100 ms of its first endpoint, beyond what they take otherwise. Those of a Service that stays without end by its
// annotation, and one without the annotation refuses.
func TestHeldConnections(t *testing.T) {
	onPaths(t, func(t *testing.T, path string) {
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

		check.Errorf(t, must.Err(lab.Client.Ask("tcp", "10.96.0.12:80")), "refused", "without the annotation")
		if server, err := lab.Client.Ask("tcp", "10.96.0.11:80"); err == nil {
			t.Errorf("%q answers in place of no endpoint", server)
		}
		targets := addresses(80, vip4, vip6)
		// all connects all clients at once, and returns when the last one was answered.
		all := func() (last time.Time, err error) {
			for _, v := range crowd(clients, clients, func(i int) visit { return ask(lab.Client, targets[i%2]) }) {
				err = cmp.Or(err, v.err)
			}
			return time.Now(), err
		}
		answered := &bound{what: "from the first endpoint's manifest until all are answered, less what they take without a wait", most: changeBound}
		for !enough(t, answered) {
			var last time.Time
			held := make(chan error)
			go func() {
				var err error
				last, err = all()
				held <- err
			}()
			p.awaitMetrics("held connections", func(m map[string]float64) bool { return m["sluice_connections_held"] == clients })
			p.awaitLog("connections wait for endpoints, up to 10m0s")
			p.awaitTold(lab, vip4, "connections, for an endpoint")
			began := time.Now()
			s.endpoints = on(8080, lab.Backends...)
			p.write("web.yaml", s.annotated("sluice.dev/hold: 10m"))
			must.OK(t, <-held)
			took := last.Sub(began)
			began = time.Now()
			last = must.Get(all())(t)
			answered.took = append(answered.took, took-last.Sub(began))
			t.Logf("%d clients are answered %v after the manifest of the first endpoint was written", clients, took)
			s.endpoints = nil
			p.settled(func() { p.write("web.yaml", s.annotated("sluice.dev/hold: 10m")) })
		}
		rounds := len(answered.took)
		held, atOnce := 0, 0
		for _, r := range p.awaitRecords(2*rounds*clients + 1) {
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
			case r.WaitedUS == 0:
				atOnce++
			case r.ConnectUS == nil || r.WaitedUS >= *r.ConnectUS:
				t.Errorf("a held client waited %d us; its record has %+v", r.WaitedUS, r)
			default:
				held++
			}
		}
		if held != rounds*clients || atOnce != rounds*clients {
			t.Errorf("%d records of %d clients that waited, and %d of as many that did not", held, rounds*clients, atOnce)
		}
		p.stop()
	})
}
