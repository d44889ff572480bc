package e2e

import (
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestAlgorithms has a Service for each algorithm, and compares who gets connections, on
// both data paths. One more Service has an idle timeout of its own.
func TestAlgorithms(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 3)
		lab.EchoTCP(t, 8080)
		a := &algorithms{t: t, lab: lab, vips: map[string]string{}}
		p := newProxy(t, lab.Node)
		a.write(p, "lc", "sluice.dev/balancer: lc", "")
		a.write(p, "p2c", "sluice.dev/balancer: power-of-two", "")
		a.write(p, "sh", "kube-router.io/service.scheduler: sh", "")
		a.write(p, "dh", "sluice.dev/balancer: dh", "")
		a.write(p, "maglev", "service.cilium.io/lb-algorithm: maglev", "")
		a.write(p, "maglev-port", "sluice.dev/balancer: maglev, sluice.dev/balancer-hash: client-port", "")
		a.write(p, "wrr", "sluice.dev/balancer: wrr", "5")
		a.write(p, "wlc", "sluice.dev/balancer: wlc", "5")
		a.write(p, "idle", "sluice.dev/idle-timeout: 1s", "")
		p.start("--datapath", path)
		a.hold("idle")

		// Held connections are shared equally, and those that end make room.
		for _, name := range []string{"lc", "p2c"} {
			held := map[string][]net.Conn{}
			for range 12 {
				server, c := a.hold(name)
				held[server] = append(held[server], c)
			}
			if name == "lc" && (len(held) != 3 || len(held["b1:8080"]) != 4 || len(held["b2:8080"]) != 4) {
				t.Errorf("%s: twelve connections are held so: %v", name, held)
			}
			for _, c := range held["b1:8080"] {
				_ = c.Close()
			}
			wait.True(t, "the ends of the closed connections", func() bool {
				records, err := readRecords(p.accessLog)
				ended := 0
				for _, r := range records {
					if r.Service == "default/"+name+":http" {
						ended++
					}
				}
				return err == nil && ended >= len(held["b1:8080"])
			})
			wait.True(t, "a connection to the endpoint that has none", func() bool {
				server, c := a.hold(name)
				if server != "b1:8080" {
					_ = c.Close()
				}
				return server == "b1:8080"
			})
			for range map[string]int{"lc": 3}[name] { // the others have four
				if server, _ := a.hold(name); server != "b1:8080" {
					t.Errorf("the endpoint with the fewest connections is b1, and %s gets the next one", server)
				}
			}
		}
		for _, name := range []string{"sh", "dh", "maglev"} {
			if servers := a.ask(name, 12); len(servers) != 1 {
				t.Errorf("%s: the connections of one client go to %v", name, servers)
			}
		}
		if servers := a.ask("maglev-port", 40); len(servers) != 3 {
			t.Errorf("maglev by ports: 40 connections of one client go to %v", servers)
		}
		// b1 has weight 5, the others 1.
		if servers := a.ask("wrr", 14); servers["b1:8080"] != 10 || servers["b2:8080"] != 2 || servers["b3:8080"] != 2 {
			t.Errorf("weights 5, 1, 1: 14 connections go to %v", servers)
		}
		held := map[string]int{}
		for range 7 {
			server, _ := a.hold("wlc")
			held[server]++
		}
		if held["b1:8080"] < 4 {
			t.Errorf("weights 5, 1, 1: seven connections are held so: %v", held)
		}
		// A change of the annotation holds for the next connection.
		a.write(p, "sh", "sluice.dev/balancer: rr", "")
		wait.True(t, "round-robin in place of a hash", func() bool { return len(a.ask("sh", 3)) == 3 })
		wait.True(t, "the end of an idle connection", func() bool {
			records, err := readRecords(p.accessLog)
			return err == nil && slices.ContainsFunc(records, func(r record) bool { return r.Service == "default/idle:http" && r.End == "idle" })
		})
		p.stop()
		for _, r := range p.records() {
			must.Equalf(t, r.Path, path, "a connection to %s: the path", r.Service)
		}
	})
}

// algorithms are Services with one port and three endpoints each.
type algorithms struct {
	t    *testing.T
	lab  *netns.Lab
	vips map[string]string
}

// write writes a Service with annotations. weight is the first endpoint's, "" for none.
func (a *algorithms) write(p *proxy, name, annotations, weight string) {
	if a.vips[name] == "" {
		a.vips[name] = "10.96.1." + string(rune('1'+len(a.vips)))
	}
	s := webService{name: name, vips: []string{a.vips[name]}, port: 80}
	for _, b := range a.lab.Backends {
		s.endpoints = append(s.endpoints, on(8080, b)[0])
	}
	first := s
	first.endpoints, s.endpoints = s.endpoints[:1], s.endpoints[1:]
	_, slice, _ := strings.Cut(first.yaml(), "---\n")
	slice = strings.Replace(slice, "name: "+name+"-ipv4", "name: "+name+"-first", 1)
	if weight != "" {
		slice = strings.Replace(slice, "metadata:\n", "metadata:\n  annotations: {service.cilium.io/weight: \""+weight+"\"}\n", 1)
	}
	text := strings.Replace(s.yaml(), "metadata:\n", "metadata:\n  annotations: {"+annotations+"}\n", 1)
	p.write(name+".yaml", text+"---\n"+slice)
}

// hold opens a connection, which stays until the test ends, and returns who serves it.
func (a *algorithms) hold(name string) (server string, c net.Conn) {
	a.t.Helper()
	c, err := a.lab.Client.Dial("tcp", a.vips[name]+":80")
	if err == nil {
		a.t.Cleanup(func() { _ = c.Close() })
		server, err = netns.AskOn(c)
	}
	must.OKf(a.t, err, "%s", name)
	return server, c
}

// ask opens connections one after another, and counts who serves them.
func (a *algorithms) ask(name string, times int) map[string]int {
	a.t.Helper()
	servers := map[string]int{}
	for range times {
		server, err := a.lab.Client.Ask("tcp", a.vips[name]+":80")
		must.OKf(a.t, err, "%s", name)
		servers[server]++
	}
	return servers
}
