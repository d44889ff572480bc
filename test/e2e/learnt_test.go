package e2e

import (
	"fmt"
	"net"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestPromise7_WhatEndpointsDidMoves: after each take-over, turns go on with the endpoint that is
// next, and an endpoint that has kept failing is ejected from the first connection on.
func TestPromise7_WhatEndpointsDidMoves(t *testing.T) {
	onPaths(t, func(t *testing.T, path string) {
		const sound, takeOvers = 5, 3
		lab := netns.NewLab(t, sound+1)
		for _, b := range lab.Backends[:sound] {
			b.EchoTCP(t, 8080)
		}
		lab.Backends[sound].ServeTCP(t, ":8080", func(c *net.TCPConn) { _ = c.SetLinger(0) })
		p := newProxy(t, lab.Node)
		p.apply(webService{name: "web", vips: []string{vip4}, port: 80, endpoints: on(8080, lab.Backends[:sound]...)})
		const other = "10.96.0.11"
		failing := webService{name: "failing", vips: []string{other}, port: 80, endpoints: on(8080, lab.Backends...)}
		p.write("failing.yaml", failing.annotated("sluice.dev/eject-after: '3'"))
		p.start("--datapath", path)
		isEjected := func() error {
			values, err := p.metrics()
			if n := values["sluice_endpoints_ejected"]; err == nil && n != 1 {
				err = fmt.Errorf("%v endpoints are ejected", n)
			}
			return err
		}
		wait.For(t, "an ejected endpoint", startTimeout, func() error {
			for range sound {
				_ = ask(lab.Client, addresses(80, other)[0])
			}
			return isEjected()
		})
		var turns []string
		turn := func(n int) {
			for range n {
				v := ask(lab.Client, addresses(80, vip4)[0])
				if v.err != nil {
					t.Fatal(v.err)
				}
				turns = append(turns, v.name)
			}
		}
		turn(sound + 2)
		for range takeOvers {
			next := *p
			next.start("--datapath", path, "--take-over")
			p.awaitLog("another sluice has taken over")
			p.waitExit()
			p = &next
			check.OK(t, isEjected())
			turn(3)
		}
		for i, name := range turns[sound:] {
			if name != turns[i] {
				t.Errorf("after turns %v, %s has the next one, want %s", turns[:i+sound], name, turns[i])
				break
			}
		}
		p.stop()
	})
}
