package e2e

import (
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestSlowStart: a Service that is new has all its endpoints at once. A new pod beside others, also
// at the address of one that went, gets few connections at first, and its whole share when its
// time is over; then the kernel's table decides again.
func TestSlowStart(t *testing.T) {
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 3)
		lab.EchoTCP(t, 8080)
		p := newProxy(t, lab.Node)
		write := func(name, vip, window, uid string, count int) {
			s := webService{name: name, vips: []string{vip}, port: 80, endpoints: on(8080, lab.Backends[:count]...)}
			text := s.annotated("sluice.dev/slow-start: " + window)
			p.write(name+".yaml", strings.ReplaceAll(text, "name: "+name+"-1}", "name: "+name+"-1, uid: "+uid+"}"))
		}
		ask := func(vip string, times int) map[string]int {
			servers := map[string]int{}
			for range times {
				server, err := lab.Client.Ask("tcp", vip+":80")
				must.OK(t, err)
				servers[server]++
			}
			return servers
		}
		const slow, quick = "10.96.0.11", "10.96.0.12"
		write("slow", slow, "1h", "one", 2)
		write("quick", quick, "1s", "one", 2)
		p.start("--datapath", path)
		if got := ask(slow, 20); got["b1:8080"] != 10 || got["b2:8080"] != 10 {
			t.Errorf("a new Service's connections go to %v", got)
		}
		// A share of a twentieth is 2 of 90 connections, and a whole one is 30.
		write("slow", slow, "1h", "one", 3)
		awaitEndpoints(t, p, 5)
		if got := ask(slow, 90); got["b3:8080"] > 15 || got["b1:8080"] < 25 || got["b2:8080"] < 25 {
			t.Errorf("beside a new endpoint, connections go to %v", got)
		}
		p.awaitTold(lab, slow, "starts slowly, with ")
		write("slow", slow, "1h", "two", 3)
		wait.True(t, "few connections to the new pod at an old address", func() bool { return ask(slow, 40)["b1:8080"] <= 8 })
		write("quick", quick, "1s", "one", 3)
		wait.True(t, "the whole share", func() bool { return ask(quick, 12)["b3:8080"] == 4 })
		if path == "kernel" {
			decided := func() float64 {
				values, err := p.metrics()
				must.OK(t, err)
				return values["sluice_flows_decided_total"]
			}
			before := decided()
			wait.True(t, "decisions of the kernel's table", func() bool {
				ask(quick, 3)
				return decided() > before
			})
		}
		p.stop()
		for _, r := range p.records() {
			must.Equalf(t, r.Path, path, "a connection to %s: the path", r.Service)
		}
	})
}

// awaitEndpoints waits until so many endpoints are in force.
func awaitEndpoints(t *testing.T, p *proxy, want float64) {
	t.Helper()
	p.awaitMetrics("endpoints", func(m map[string]float64) bool { return m["sluice_service_endpoints"] == want })
}
