package e2e

import (
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestHostileClientsOfTheSocket has clients of the admin socket list all connections
// without end, ask and not read, send nonsense, and come in hundreds: their number is
// bounded, and connections go on beside them.
func TestHostileClientsOfTheSocket(t *testing.T) {
	const (
		open, readers, silent, crowd = 200, 16, 16, 1000
		rounds, length               = 3, 400 * time.Millisecond
		pause                        = 10 * time.Millisecond // of each client between two connections
		least                        = 0.1                   // of the rate; the clients need the CPUs, too
		most                         = 64 + 16
	)
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	path := fmt.Sprintf("/run/sluice/admin-%d.sock", p.namespace())
	address := addresses(80, vip4)[0]
	held := hold(t, lab.Client, address, open)
	rate := func() float64 {
		var done atomic.Int64
		began := time.Now()
		var clients sync.WaitGroup
		for range 4 {
			clients.Go(func() {
				for time.Since(began) < length {
					if _, err := lab.Client.Ask("tcp", address); err != nil {
						t.Error(err)
						return
					}
					done.Add(1)
				}
			})
		}
		clients.Wait()
		return float64(done.Load()) / time.Since(began).Seconds()
	}
	descriptors := func() int {
		list := must.Get(os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)))(t)
		return len(list)
	}
	// attack begins hostile clients, and returns what ends them.
	attack := func() (end func()) {
		stop := make(chan struct{})
		var attackers sync.WaitGroup
		until := func(f func(c net.Conn)) {
			attackers.Go(func() {
				next := time.NewTicker(pause)
				defer next.Stop()
				for {
					select {
					case <-stop:
						return
					case <-next.C:
					}
					if c, err := net.Dial("unix", path); err == nil {
						_ = c.SetDeadline(time.Now().Add(5 * time.Second))
						f(c)
						_ = c.Close()
					}
				}
			})
		}
		const list = "GET /v1/connections/stream HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
		for range readers {
			until(func(c net.Conn) {
				_, _ = io.WriteString(c, list)
				_, _ = io.Copy(io.Discard, c)
			})
		}
		for range silent {
			until(func(c net.Conn) {
				_, _ = io.WriteString(c, list)
				<-stop
			})
		}
		until(func(c net.Conn) { _, _ = io.WriteString(c, "GET /%zz HTTP/9.9\r\n\x00\r\n\r\n") })
		return func() { close(stop); attackers.Wait() }
	}
	best := 0.0
	for range rounds {
		before := rate()
		end := attack()
		beside := rate()
		end()
		best = max(best, beside/before)
	}
	if best < least {
		t.Errorf("beside hostile clients the rate of connections is %.2f of what it was, want at least %.2f", best, least)
	} else {
		t.Logf("%.2f of the rate", best)
	}
	base := descriptors()
	for range crowd {
		wait.For(t, "the socket takes another client", startTimeout, func() error {
			c, err := net.Dial("unix", path)
			if err == nil {
				t.Cleanup(func() { _ = c.Close() })
			}
			return err
		})
	}
	// Clients that say nothing are closed after 10 s in any case.
	wait.For(t, "clients make room for others", startTimeout, func() error {
		metrics, err := p.metrics()
		if n := metrics["sluice_http_connections_evicted_total"]; err == nil && n < crowd-most {
			return fmt.Errorf("%g of %d clients made room", n, crowd)
		}
		return err
	})
	wait.For(t, "the clients that are too many are closed", startTimeout, func() error {
		if n := descriptors() - base; n > most {
			return fmt.Errorf("%d descriptors more", n)
		}
		return nil
	})
	alive(t, held)
	if out, err := sluice(t, lab, "status"); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}
