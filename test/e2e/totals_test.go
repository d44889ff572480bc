package e2e

import (
	"maps"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestPromise7_TotalsDoNotFall: who reads the metrics all the time sees no total fall over take-overs,
// and in the end each connection counted once.
func TestPromise7_TotalsDoNotFall(t *testing.T) {
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			const takeOvers, each, held = 3, 5, 4
			lab := netns.NewLab(t, 2)
			for _, b := range lab.Backends {
				b.EchoTCP(t, 8080)
			}
			p := prepareProxy(t, lab, []webService{webOn(lab)})
			p.start("--datapath", path)
			target := addresses(80, vip4)[0]
			opened := 0
			connect := func() {
				for range each {
					if _, err := lab.Client.Ask("tcp", target); err != nil {
						t.Fatal(err)
					}
					opened++
				}
			}
			var conns []net.Conn // which outlive all take-overs
			for range held {
				c, err := lab.Client.Dial("tcp", target)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if _, err := netns.AskOn(c); err != nil {
					t.Fatal(err)
				}
				conns = append(conns, c)
				opened++
			}
			connect()

			stop, reader := make(chan struct{}), *p
			var reading sync.WaitGroup
			reading.Go(func() {
				last := make(map[string]float64)
				for {
					select {
					case <-stop:
						return
					case <-time.After(10 * time.Millisecond):
					}
					now, err := reader.metrics()
					if err != nil {
						continue // a process that leaves cuts off what it reads
					}
					for name, value := range now {
						if !strings.HasPrefix(name, "sluice_") || !strings.HasSuffix(name, "_total") {
							delete(now, name)
						} else if value < last[name] {
							t.Errorf("%s falls from %v to %v", name, last[name], value)
						}
					}
					maps.Copy(last, now)
				}
			})
			for range takeOvers {
				next := *p
				next.start("--datapath", path, "--take-over")
				p.awaitLog("another sluice has taken over")
				p.waitExit()
				p = &next
				connect()
			}
			for _, c := range conns {
				_ = c.Close()
			}
			wait.For(t, "each connection counted once", startTimeout, func() error {
				values, err := p.metrics()
				if err != nil {
					return err
				}
				if values["sluice_connections_opened_total"] != float64(opened) || values["sluice_connections_closed_total"] != float64(opened) {
					return errNotYet
				}
				return nil
			})
			close(stop)
			reading.Wait()
			p.stop()
		})
	}
}
