//go:build cluster

package cluster

import (
	"fmt"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/test/netns"
)

// TestRollout replaces three pods by three others ten times, one after another, while 500
// clients connect each second. Each old pod refuses new connections before the API says that
// it has gone, as pods do whose programs end at once on SIGTERM. With Sluice no connection
// fails, on both data paths; kube-proxy's clients are refused (istio/istio#58514).
func TestRollout(t *testing.T) {
	w := setUp(t)
	for _, p := range proxies {
		t.Run(p.name, func(t *testing.T) {
			w := w.with(t, "rollout-"+p.name)
			w.admin.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: w.namespace}})
			cmd := p.start(w)
			defer stop(cmd)
			failed, all := w.rollOut(10)
			t.Logf("%s: %d of %d new connections failed in 10 rollouts", p.name, failed, all)
			if isSluice := p.name != "kube-proxy"; (failed > 0) == isSluice {
				t.Errorf("%s: %d new connections failed", p.name, failed)
			}
			w.admin.deleteServices(w.namespace)
		})
	}
	if out, err := w.hosts.Node.Command(t, program(t, "kube-proxy"), "--cleanup").CombinedOutput(); err != nil {
		t.Logf("kube-proxy --cleanup: %v\n%s", err, out)
	}
}

// rollOut replaces all pods, some times, and returns how many new connections failed. The old
// pods and the new ones have different ports on the same hosts.
func (w *world) rollOut(times int) (failed, all int) {
	w.t.Helper()
	svc := w.service("web", nil)
	old, next := int32(8080), int32(9090)
	put := func(port int32, pods []endpoint) { w.sliceOf("web", fmt.Sprintf("web-%d", port), false, port, pods...) }
	put(next, nil)
	put(old, w.all())
	address := at(svc.Spec.ClusterIP, 80)
	w.until("it is served", func() error {
		_, err := askWithin(answer, w.hosts.Outside, "tcp", address)
		return err
	})
	c := w.arrive(address, 500)
	c.more(100)
	for range times {
		for i, pod := range w.all() {
			put(next, w.all()[:i+1])
			c.more(25)
			w.refuse(pod.host, old)
			put(old, w.all()[i+1:])
			c.more(25)
		}
		for _, pod := range w.all() {
			w.accept(pod.host, old)
		}
		old, next = next, old
	}
	return c.end()
}

// refuse has a host refuse new connections to a port. What it has accepted goes on.
func (w *world) refuse(h *netns.Host, port int32) {
	w.t.Helper()
	w.nftOn(h, fmt.Sprintf("table inet ended-%[1]d { chain input { type filter hook input priority 0; tcp dport %[1]d tcp flags & (syn|ack) == syn reject with tcp reset; }; }", port))
}

// accept undoes refuse.
func (w *world) accept(h *netns.Host, port int32) {
	w.t.Helper()
	w.nftOn(h, fmt.Sprintf("delete table inet ended-%d", port))
}

// arrivals are new connections that are made at a rate, whether or not earlier ones have been
// answered.
type arrivals struct {
	w       *world
	stop    chan struct{}
	running sync.WaitGroup

	mu     sync.Mutex
	served int     // guarded by mu
	errs   []error // guarded by mu
}

func (w *world) arrive(address string, perSecond int) *arrivals {
	a := &arrivals{w: w, stop: make(chan struct{})}
	a.running.Go(func() {
		tick := time.NewTicker(time.Second / time.Duration(perSecond))
		defer tick.Stop()
		for {
			select {
			case <-a.stop:
				return
			case <-tick.C:
				a.running.Go(func() { a.ask(address) })
			}
		}
	})
	return a
}

func (a *arrivals) ask(address string) {
	_, err := askWithin(answer, a.w.hosts.Outside, "tcp", address)
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.served++; err != nil {
		a.errs = append(a.errs, err)
	}
}

// more waits until so many more connections are over.
func (a *arrivals) more(n int) {
	a.w.t.Helper()
	count := func() int {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.served
	}
	want := count() + n
	a.w.until("clients have been answered", func() error {
		if count() < want {
			return errNotYet
		}
		return nil
	})
}

// end stops, and returns how many connections failed, of how many.
func (a *arrivals) end() (failed, all int) {
	close(a.stop)
	a.running.Wait()
	for _, err := range a.errs[:min(len(a.errs), 3)] {
		a.w.t.Logf("a client: %v", err)
	}
	return len(a.errs), a.served
}
