package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// swallow makes a port of the host a black hole: it neither answers nor refuses
// connection attempts (F5).
func swallow(t *testing.T, h *netns.Host, port uint16) {
	t.Helper()
	nothing := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: 0}}
	filter := unix.SockFprog{Len: 1, Filter: &nothing[0]}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) {
			err = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &filter)
		}); e != nil {
			return e
		}
		return err
	}}
	lc.SetMultipathTCP(false)
	l := must.Get(h.ListenConfig(&lc, "tcp", fmt.Sprintf(":%d", port)))(t)
	t.Cleanup(func() { _ = l.Close() })
}

// visit is a client's view of one connection.
type visit struct {
	client  netip.AddrPort
	name    string // of the endpoint
	elapsed time.Duration
	err     error
}

// ask connects once, talks to the endpoint and closes.
func ask(from *netns.Host, address string) visit {
	start := time.Now()
	c, err := from.Dial("tcp", address)
	if err != nil {
		return visit{err: err, elapsed: time.Since(start)}
	}
	defer c.Close()
	v := visit{client: netip.MustParseAddrPort(c.LocalAddr().String())}
	v.name, v.err = netns.AskOn(c)
	v.elapsed = time.Since(start)
	return v
}

// crowd makes n connections from n clients at once, spread over the addresses.
func crowd(n, clients int, one func(i int) visit) []visit {
	return crowdUntil(n, clients, one, func(visit) bool { return false })
}

// crowdUntilOneFails begins no more connections after the first that failed, as each
// may take its time to do so. It gives those that it made.
func crowdUntilOneFails(n, clients int, one func(i int) visit) []visit {
	return crowdUntil(n, clients, one, func(v visit) bool { return v.err != nil })
}

func crowdUntil(n, clients int, one func(i int) visit, enough func(visit) bool) []visit {
	visits := make([]visit, n)
	next := make(chan int)
	var over atomic.Bool
	var wg sync.WaitGroup
	for range clients {
		wg.Go(func() {
			for i := range next {
				if visits[i] = one(i); enough(visits[i]) {
					over.Store(true)
				}
			}
		})
	}
	made := 0
	for ; made < n && !over.Load(); made++ {
		next <- made
	}
	close(next)
	wg.Wait()
	return visits[:made]
}

// firstTimeout is the timeout of the first attempt, and allTimeouts that of the
// four attempts together, with promptDials.
const firstTimeout, allTimeouts = 250 * time.Millisecond, 3750 * time.Millisecond

// TestPromise1_DeadEndpointCostsAMomentNeverTheConnection has one dead endpoint of
// three, in each of the two ways.
func TestPromise1_DeadEndpointCostsAMomentNeverTheConnection(t *testing.T) {
	const connections, clients = 1000, 16
	for _, way := range []string{"closed port", "black hole"} {
		t.Run(way, func(t *testing.T) {
			lab := netns.NewLab(t, 3)
			lab.Backends[0].EchoTCP(t, 8080)
			lab.Backends[1].EchoTCP(t, 8080)
			dials := patientDials // a closed port answers at once
			if way == "black hole" {
				swallow(t, lab.Backends[2], 8080)
				dials = promptDials
			}
			p := startProxy(t, lab, []webService{webOn(lab)}, dials)
			targets := addresses(80, vip4, vip6)
			visits := crowdUntilOneFails(connections, clients, func(i int) visit { return ask(lab.Client, targets[i%2]) })
			for _, v := range visits {
				if v.err != nil {
					t.Errorf("%s: %v", v.client, v.err)
				}
			}
			if t.Failed() {
				return
			}
			p.stop()

			records := p.records()
			check.Equalf(t, len(records), connections, "records of %d connections", connections)
			var undelayed, retried, attempts []time.Duration
			byClient := index(t, records)
			for _, v := range visits {
				r, ok := byClient[v.client]
				if !ok {
					t.Errorf("%s has no record", v.client)
					continue
				}
				if len(r.Failed) == 0 {
					undelayed = append(undelayed, v.elapsed)
					continue
				}
				retried = append(retried, v.elapsed)
				for _, a := range r.Failed {
					attempts = append(attempts, time.Duration(a.US)*time.Microsecond)
				}
				r.wantDeadEndpoint(t, lab.Backends[2], way == "black hole")
			}
			if t.Failed() {
				return
			}
			slices.Sort(undelayed)
			slices.Sort(retried)
			slices.Sort(attempts)
			if len(retried) == 0 || len(retried) > connections/10 {
				t.Fatalf("%d connections met the dead endpoint, %d did not: those that come later should know of it", len(retried), len(undelayed))
			}
			t.Logf("%d did not meet it: median %v, 99%% %v, slowest %v", len(undelayed),
				undelayed[len(undelayed)/2], undelayed[len(undelayed)*99/100], undelayed[len(undelayed)-1])
			t.Logf("%d met it: median %v, slowest %v", len(retried), retried[len(retried)/2], retried[len(retried)-1])
			t.Logf("%d failed attempts took: median %v, slowest %v", len(attempts), attempts[len(attempts)/2], attempts[len(attempts)-1])
			// Half of each, as single connections may wait on a busy machine.
			if median := retried[len(retried)/2]; median > allTimeouts {
				t.Errorf("clients that met the dead endpoint took %v, more than the four attempts together", median)
			}
			if median := undelayed[len(undelayed)/2]; median >= firstTimeout {
				t.Errorf("clients that never met the dead endpoint took %v", median)
			}
		})
	}
}

// TestPromise1_OneLiveEndpointOfManyIsFound has only one live endpoint, so that
// clients meet several dead ones in a row.
func TestPromise1_OneLiveEndpointOfManyIsFound(t *testing.T) {
	lab := netns.NewLab(t, 6)
	lab.Backends[3].EchoTCP(t, 8080)
	swallow(t, lab.Backends[0], 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, promptDials)
	target := addresses(80, vip4)[0]
	for _, v := range crowdUntilOneFails(30, 6, func(int) visit { return ask(lab.Client, target) }) {
		if v.err != nil || v.name != "b4:8080" {
			t.Errorf("%s: got %q, %v", v.client, v.name, v.err)
		}
	}
	p.stop()
}

// errorText turns the result of a comparison into an error.
type errorText string

func (e errorText) Error() string { return string(e) }
