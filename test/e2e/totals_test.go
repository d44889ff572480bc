package e2e

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestPromise7_TotalsDoNotFall reads the metrics all the time over take-overs. Once a process has
// left, no total is less than anybody has read, and in the end each connection counted once.
func TestPromise7_TotalsDoNotFall(t *testing.T) {
	onPaths(t, func(t *testing.T, path string) {
		const takeOvers, each, held = 3, 5, 4
		lab := netns.NewLab(t, 2)
		lab.EchoTCP(t, 8080)
		p := prepareProxy(t, lab, []webService{webOn(lab)})
		p.start("--datapath", path)
		target := addresses(80, vip4)[0]
		opened := 0
		connect := func() {
			for range each {
				must.OK(t, must.Err(lab.Client.Ask("tcp", target)))
				opened++
			}
		}
		var conns []net.Conn // which outlive all take-overs
		for range held {
			c := must.Get(lab.Client.Dial("tcp", target))(t)
			defer c.Close()
			must.OK(t, must.Err(netns.AskOn(c)))
			conns = append(conns, c)
			opened++
		}
		connect()

		// The largest values that anybody has read.
		stop, reader, largest := make(chan struct{}), *p, make(map[string]float64)
		var mu sync.Mutex
		read := func(p *proxy) (behind error) {
			now, err := p.metrics()
			if err != nil {
				return err // a process that leaves cuts off what it reads
			}
			mu.Lock()
			defer mu.Unlock()
			for name, value := range now {
				switch {
				case !strings.HasPrefix(name, "sluice_") || !strings.HasSuffix(name, "_total"):
				case value < largest[name]:
					behind = fmt.Errorf("%s was %v, and is %v", name, largest[name], value)
				default:
					largest[name] = value
				}
			}
			return behind
		}
		var reading sync.WaitGroup
		reading.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(10 * time.Millisecond):
					_ = read(&reader)
				}
			}
		})
		for range takeOvers {
			next := *p
			next.start("--datapath", path, "--take-over")
			p.awaitLog("another sluice has taken over")
			p.waitExit()
			p = &next
			wait.For(t, "no total is less than before", startTimeout, func() error { return read(p) })
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
		wait.For(t, "no total is less than before", startTimeout, func() error { return read(p) })
		p.stop()
	})
}
