package e2e

import (
	"bufio"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestAffinityHoldsAndMoves removes the pinned endpoint in both ways: from the
// manifests (A5.4), and by killing it while the manifests still name it (A5.7).
func TestAffinityHoldsAndMoves(t *testing.T) {
	for _, way := range []string{"leaves", "dies"} {
		t.Run(way, func(t *testing.T) {
			lab := netns.NewLab(t, 3)
			echoes := map[string]*netns.Echo{}
			for _, b := range lab.Backends {
				e := b.EchoTCP(t, 8080)
				echoes[e.Name] = e
			}
			web := webOn(lab)
			web.affinity = 100
			p := startProxy(t, lab, []webService{web})
			target := addresses(80, vip4)[0]

			// A5.8: fifteen consecutive connections.
			first := sameFifteenTimes(t, lab.Client, target)
			if way == "dies" {
				echoes[first].Close()
			} else {
				left := web
				left.endpoints = nil
				for _, b := range lab.Backends {
					if b.Name()+":8080" != first {
						left.endpoints = append(left.endpoints, on(8080, b)...)
					}
				}
				p.apply(left)
			}
			var second string
			wait.For(t, "another endpoint answers", startTimeout, func() (err error) {
				if second, err = lab.Client.Ask("tcp", target); err == nil && second == first {
					return errNotYet
				}
				return err
			})
			check.Equalf(t, sameFifteenTimes(t, lab.Client, target), second, "where it moved")
			// Another client has its own pin. The other family is another address
			// of the same client, so it has another key (A5.1).
			check.OK(t, must.Err(lab.Node.Ask("tcp", target)))
			p.stop()

			seen := map[string]int{}
			for _, r := range p.records() {
				if r.Client.Addr() == lab.Client.IPv4 {
					seen[r.Affinity]++
				}
			}
			if seen["new"] != 1 || seen["moved"] != 1 || seen["none"] != 0 || seen["hit"] < 28 {
				t.Errorf("the records say %v, want one new, one moved, and hits", seen)
			}
		})
	}
}

func sameFifteenTimes(t *testing.T, from *netns.Host, address string) string {
	t.Helper()
	first := ""
	for i := range 15 {
		name := must.Get(from.Ask("tcp", address))(t)
		if first == "" {
			first = name
		}
		must.Equalf(t, name, first, "where connection %d went", i+1)
	}
	return first
}

// TestPromise7_AffinityMoves: clients keep their endpoint over a take-over, with TCP and UDP, on
// both data paths.
func TestPromise7_AffinityMoves(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 6)
		lab.EchoTCP(t, 8080)
		lab.EchoUDP(t, 8080)
		p := newProxy(t, lab.Node)
		web := webOn(lab)
		web.affinity = 3600
		p.apply(web)
		dns := web
		dns.name, dns.vips = "dns", []string{"10.96.0.11"}
		p.write("dns.yaml", strings.ReplaceAll(dns.yaml(), "protocol: TCP", "protocol: UDP"))
		p.start("--datapath", path)
		type client struct {
			host        *netns.Host
			network, to string
			endpoint    string
		}
		var clients []client
		for _, h := range append([]*netns.Host{lab.Client}, lab.Backends...) {
			clients = append(clients, client{h, "tcp", vip4 + ":80", ""}, client{h, "udp", "10.96.0.11:80", ""})
		}
		ask := func(c *client) string {
			conn, err := c.host.Dial(c.network, c.to)
			must.OK(t, err)
			defer conn.Close()
			answers := bufio.NewReader(conn)
			for range 10 { // the kernel may drop datagrams on a busy machine
				if _, err = conn.Write([]byte("x\n")); err != nil {
					t.Fatal(err)
				}
				_ = conn.SetDeadline(time.Now().Add(startTimeout / 10))
				name, err := answers.ReadString('\n')
				if err == nil {
					return name
				}
			}
			t.Fatalf("%s, %s: %v", c.host.Name(), c.network, err)
			return ""
		}
		for i := range clients {
			clients[i].endpoint = ask(&clients[i])
		}
		next := *p
		next.start("--datapath", path, "--take-over")
		p.awaitLog("another sluice has taken over")
		// In another order: each would get another endpoint.
		for i := range clients {
			c := &clients[len(clients)-1-i]
			check.Equalf(t, ask(c), c.endpoint, "%s, %s: the endpoint", c.host.Name(), c.network)
		}
		next.stop()
	})
}
