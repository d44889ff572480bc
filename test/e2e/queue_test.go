package e2e

import (
	"fmt"
	"net"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestLimitsAndQueue: connections beyond an endpoint's limit go to another endpoint, those beyond
// all limits wait in order of arrival, and those for which no place becomes free in time are
// reset. Clients that leave give up their place.
func TestLimitsAndQueue(t *testing.T) {
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 2)
		lab.EchoTCP(t, 8080)
		p := newProxy(t, lab.Node)
		each := webService{name: "each", vips: []string{vip4}, port: 80, endpoints: on(8080, lab.Backends...)}
		p.write("each.yaml", each.annotated("sluice.dev/max-connections-per-endpoint: '2', sluice.dev/queue-timeout: 10m"))
		whole := webService{name: "whole", vips: []string{"10.96.0.11"}, port: 80, endpoints: on(8080, lab.Backends...)}
		p.write("whole.yaml", whole.annotated("sluice.dev/max-connections: '3', sluice.dev/queue-timeout: 100ms"))
		p.start("--datapath", path)

		dial := func(vip string) net.Conn {
			return lab.Client.Connect(t, "tcp", vip+":80")
		}
		name := func(c net.Conn) string {
			return must.Get(netns.AskOn(c))(t)
		}
		queued := func(want float64) {
			p.awaitMetrics("queued connections", func(m map[string]float64) bool { return m["sluice_connections_queued"] == want })
		}
		got := map[string]int{}
		var open []net.Conn
		for range 4 {
			c := dial(vip4)
			got[name(c)]++
			open = append(open, c)
		}
		if got["b1:8080"] != 2 || got["b2:8080"] != 2 {
			t.Errorf("four connections with two for each endpoint go to %v", got)
		}
		var waiting []net.Conn
		for i := range 3 {
			waiting = append(waiting, dial(vip4))
			queued(float64(i + 1))
		}
		p.awaitLog("as many as sluice.dev/max-connections-per-endpoint (for each endpoint) allows: further ones wait up to 10m0s")
		p.awaitTold(lab, vip4, "full, with 2 connections")
		p.awaitTold(lab, vip4, "waiting    3 connections, at a limit")
		_ = waiting[0].Close()
		queued(2)
		for i, c := range waiting[1:] {
			_ = open[i].Close()
			name(c)
			queued(float64(1 - i))
		}

		for range 3 {
			name(dial("10.96.0.11"))
		}
		if server, err := lab.Client.Ask("tcp", "10.96.0.11:80"); err == nil {
			t.Errorf("%s serves a fourth connection", server)
		}
		p.stop()
		ends := map[string]int{}
		for _, r := range p.records() {
			check.Equalf(t, r.Path, "relay", "a connection to %s: the path", r.Service)
			if r.End == "limit" && (r.Attempts != 0 || r.DurationUS < 100_000 || r.WaitedUS < 50_000 || r.WaitedUS > r.DurationUS) {
				t.Errorf("reset at the limit after %d us, a wait of %d us and %d attempts", r.DurationUS, r.WaitedUS, r.Attempts)
			}
			ends[r.Service+" "+r.End]++
		}
		want := map[string]int{"default/each:http client_fin": 3, "default/each:http shutdown": 4, "default/whole:http shutdown": 3, "default/whole:http limit": 1}
		check.Equalf(t, fmt.Sprint(ends), fmt.Sprint(want), "ends")
	})
}
