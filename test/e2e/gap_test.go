package e2e

import (
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/netns"
)

// asker asks again and again, and counts the answers.
type asker struct {
	name            string
	host            *netns.Host
	to              string
	served, refused int
	longest         time.Duration // in which none was served
}

// run returns once a question is answered that began after the start.
func (a *asker) run(t *testing.T, started <-chan struct{}) {
	began := time.Now()
	for last := began; time.Since(began) < readyTimeout; {
		after := false
		select {
		case <-started:
			after = true
		default:
		}
		if _, err := a.host.Ask("tcp", a.to); err != nil {
			a.refused++
			time.Sleep(time.Millisecond) // leaves the starting proxy a processor
			continue
		}
		now := time.Now()
		a.served, a.longest, last = a.served+1, max(a.longest, now.Sub(last)), now
		if after {
			return
		}
	}
	t.Errorf("%s: %d served, %d refused, and none after the start", a.name, a.served, a.refused)
}

// TestKilledProxyServesSoonAgain kills the proxy under load and starts it again. Clients of the
// node itself, and clients of node ports from outside, are served again once the next process
// has worked for a moment: with kernel flows about as early as with the relay, and not only after
// the kernel has verified the programs. Its CPU time is what counts, as the machine may have
// other work.
func TestKilledProxyServesSoonAgain(t *testing.T) {
	t.Parallel()
	var relay time.Duration // CPU time until the relay serves
	for _, path := range []string{"relay", "kernel"} {
		t.Run(path, func(t *testing.T) {
			lab := netns.NewLab(t, 1)
			lab.Backends[0].EchoTCP(t, 8080)
			p := newProxy(t, lab.Node)
			p.put(webAtNodePort(lab))
			p.start("--datapath", path)
			for range 3 {
				askers := []asker{
					{name: "the node", host: lab.Node, to: addresses(80, vip4)[0]},
					{name: "the node by IPv6", host: lab.Node, to: addresses(80, vip6)[0]},
					{name: "a node port from outside", host: lab.Client, to: addresses(30080, lab.Node.IPv4.String())[0]},
					{name: "an IPv6 node port from outside", host: lab.Client, to: addresses(30080, lab.Node.IPv6.String())[0]},
				}
				started := make(chan struct{})
				var running sync.WaitGroup
				for i := range askers {
					running.Go(func() { askers[i].run(t, started) })
				}
				p.kill()
				p.launch("--datapath", path)
				close(started)
				running.Wait()
				busy := p.cpu()
				for _, a := range askers {
					t.Logf("%s: %d served, %d refused, none for %v", a.name, a.served, a.refused, a.longest)
				}
				t.Logf("all were served again after %v of CPU time", busy)
				if path == "relay" {
					relay = max(relay, busy)
				} else if busy > time.Second+10*relay {
					t.Errorf("the relay alone needed %v of CPU time", relay)
				}
				p.awaitReady()
			}
		})
	}
}
