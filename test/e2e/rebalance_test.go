package e2e

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// idleClients keep a connection open each, say nothing, and connect again when theirs is
// closed in order.
type idleClients struct {
	mu     sync.Mutex
	on     map[string]int // open connections by server; guarded by mu
	closed int            // guarded by mu
	errs   []error        // guarded by mu
	conns  map[net.Conn]struct{}
	ends   bool // guarded by mu
	done   sync.WaitGroup
}

func (k *idleClients) run(from *netns.Host, address string) {
	for {
		c, err := from.Dial("tcp", address)
		if err != nil {
			k.fail(fmt.Errorf("connect: %w", err))
			return
		}
		name, err := netns.AskOn(c)
		if err != nil {
			k.fail(fmt.Errorf("connect: %w", err))
			return
		}
		if !k.opened(c, name) {
			return
		}
		if _, err = c.Read(make([]byte, 1)); !k.ended(c, name, err) {
			return
		}
	}
}

func (k *idleClients) fail(err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if !k.ends {
		k.errs = append(k.errs, err)
	}
}

func (k *idleClients) opened(c net.Conn, name string) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ends {
		_ = c.Close()
		return false
	}
	k.on[name]++
	k.conns[c] = struct{}{}
	return true
}

func (k *idleClients) ended(c net.Conn, name string, err error) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	_ = c.Close()
	delete(k.conns, c)
	k.on[name]--
	k.closed++
	if !errors.Is(err, io.EOF) && !k.ends {
		k.errs = append(k.errs, err)
	}
	return !k.ends
}

// state returns the connections by server, and how many were closed so far.
func (k *idleClients) state() (on map[string]int, closed int, err error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return maps.Clone(k.on), k.closed, errors.Join(k.errs...)
}

func (k *idleClients) stop() {
	k.mu.Lock()
	k.ends = true
	for c := range k.conns {
		_ = c.Close()
	}
	k.mu.Unlock()
	k.done.Wait()
}

// TestRebalance: 600 idle connections to three endpoints move to six after three came: each
// has 90 to 110 then. They are closed in order, one after another, and connections in use are
// not. A Service without the annotation keeps its connections.
func TestRebalance(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		const clients = 600
		lab := netns.NewLab(t, 6)
		lab.EchoTCP(t, 8080)
		p := newProxy(t, lab.Node)
		web := webService{name: "web", vips: []string{vip4, vip6}, port: 80, endpoints: on(8080, lab.Backends[:3]...)}
		plain := webService{name: "plain", vips: []string{"10.96.0.11"}, port: 80, endpoints: on(8080, lab.Backends[:3]...)}
		p.write("web.yaml", web.annotated("sluice.dev/rebalance: 10s"))
		p.apply(plain)
		p.start("--datapath", path)
		held := hold(t, lab.Client, "10.96.0.11:80", 6)
		busy, stop := make(chan error, 6), make(chan struct{})
		for range cap(busy) {
			c := must.Get(lab.Client.Dial("tcp", addresses(80, vip4)[0]))(t)
			k := &talker{conn: c, pause: 20 * time.Millisecond}
			go func() { busy <- k.run(stop); _ = c.Close() }()
		}
		idle := &idleClients{on: make(map[string]int), conns: make(map[net.Conn]struct{})}
		for i := range clients {
			idle.done.Go(func() { idle.run(lab.Client, addresses(80, vip4, vip6)[i%2]) })
		}
		t.Cleanup(idle.stop)
		even := func(endpoints int) error {
			on, _, err := idle.state()
			for _, b := range lab.Backends[:endpoints] {
				n, mean := on[b.Name()+":8080"], clients/endpoints
				if err == nil && (10*n < 9*mean || 10*n > 11*mean) {
					err = fmt.Errorf("%v", on)
				}
			}
			return err
		}
		wait.For(t, "three endpoints share the connections", startTimeout, func() error { return even(3) })
		if _, closed, _ := idle.state(); closed > 0 {
			t.Errorf("%d connections are closed before endpoints came", closed)
		}

		web.endpoints, plain.endpoints = on(8080, lab.Backends...), on(8080, lab.Backends...)
		began := time.Now()
		p.write("web.yaml", web.annotated("sluice.dev/rebalance: 10s"))
		p.apply(plain)
		wait.For(t, "six endpoints share the connections", 2*startTimeout, func() error { return even(6) })
		took := time.Since(began)
		wait.Until(t, "the log says how many were closed", startTimeout, func() bool { return p.stderr.Contains("idle connections were closed after endpoints came") })
		on, closed, err := idle.state()
		t.Logf("%d connections were closed until all was even, %v after the endpoints came: %v", closed, took.Round(time.Second), on)
		if err != nil || closed > clients {
			t.Errorf("%d connections were closed: %v", closed, err)
		}
		close(stop)
		for range cap(busy) {
			check.OKf(t, <-busy, "a connection in use")
		}
		alive(t, held)
		idle.stop()
		rebalanced := 0
		for _, r := range p.awaitRecords(clients + closed + cap(busy)) {
			check.Equalf(t, r.Path, "relay", "%s has the data path", r.Client)
			if r.End == "rebalanced" {
				rebalanced++
			}
		}
		check.Equalf(t, rebalanced, closed, "records end with rebalanced")
		p.stop()
	})
}
