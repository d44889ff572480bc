//go:build cluster

package cluster

import (
	"context"
	"fmt"
	"net"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// TestWatchers measures what proxies cost the API server: the bytes and watches of one Sluice
// and of one kube-proxy, and the API server's CPU for many instances of the source that Sluice
// has, at the start and for each changed slice. It prints the figures, and fails only if an
// instance misses a change. SLUICE_TEST_WATCHERS has the numbers of Services, of endpoints of
// each, of changes and of instances: "1000 10 1000 200".
func TestWatchers(t *testing.T) {
	size, instances := counted{scale: scale{services: 20, endpoints: 3, changes: 10}}, 3
	if text := os.Getenv("SLUICE_TEST_WATCHERS"); text != "" {
		if _, err := fmt.Sscan(text, &size.services, &size.endpoints, &size.changes, &instances); err != nil || size.changes > size.services {
			t.Fatalf("SLUICE_TEST_WATCHERS=%q: %v; changes are at most the Services", text, err)
		}
		size.measured = true
	}
	w := setUp(t)
	w.namespace = "default"
	w.scaled = time.Duration(size.services*(1+size.endpoints)) * 10 * time.Millisecond
	w.populate(size.scale)
	var report strings.Builder
	fmt.Fprintf(&report, "%d Services with %d endpoints, %d changed slices\n", size.services, size.services*size.endpoints, size.changes)
	for _, p := range []contender{{name: "sluice"}, {name: "kube-proxy", minSyncPeriod: "1s"}} {
		fmt.Fprintln(&report, w.measureTraffic(p, size))
	}
	report.WriteString(w.measureInstances(size, instances))
	t.Log(report.String())
}

// counted is the size of a cluster whose API server is watched. measured says that figures are
// wanted, for which the API server has to rest between two parts.
type counted struct {
	scale
	measured bool
}

func (w *world) restIf(measured bool) {
	w.t.Helper()
	if measured {
		w.rest(w.controlPlane.api.Process.Pid)
	}
}

// measureTraffic starts a proxy and has slices change. It returns what passed between it and
// the API server.
func (w *world) measureTraffic(p contender, size counted) string {
	w.t.Helper()
	w.until("the controllers watch, too", func() error {
		if w.watches()["pods"] < 2 { // the API server watches its own
			return errNotYet
		}
		return nil
	})
	w.restIf(size.measured)
	idle, link := w.watches(), new(meter)
	w.write(kubeconfigName("system:kube-proxy"), kubeconfig("https://"+link.serve(w, w.hosts.Node.Listen), "system:kube-proxy"))
	cmd := w.startScaled(p)
	w.expectSoon(at(bulkServiceIP(size.services-1).String(), 80), "pod-3:8080")
	w.awaitSilence(link)
	first, watches := link.down.Load(), w.watches()
	for kind, n := range idle {
		if watches[kind] -= n; watches[kind] == 0 {
			delete(watches, kind)
		}
	}
	w.roll(size)
	w.awaitSilence(link)
	later := link.down.Load() - first
	_ = cmd.Process.Signal(os.Interrupt)
	_ = cmd.Wait()
	return fmt.Sprintf("one %s: receives %d KB at the start, %d B for each change; sends %d KB; watches %v",
		p.name, first>>10, later/int64(size.changes), link.up.Load()>>10, watches)
}

// measureInstances runs many sources beside each other, and has slices change. It returns what
// they cost the API server, beyond the changes themselves.
func (w *world) measureInstances(size counted, n int) string {
	w.t.Helper()
	pid := w.controlPlane.api.Process.Pid
	spent := func(what func()) time.Duration {
		w.restIf(size.measured)
		before := processorTime(w.t, pid)
		what()
		w.restIf(size.measured)
		return processorTime(w.t, pid) - before
	}
	alone := spent(func() { w.roll(size) })

	link := new(meter)
	address := link.serve(w, net.Listen)
	memory0 := memory(w.t, pid, "VmRSS:")
	run, stop := context.WithCancel(ctx)
	defer stop()
	all := make([]instance, n)
	start := spent(func() {
		for i := range all {
			// Each has a connection of its own, as client-go shares those of equal configurations.
			w.write("instance.conf", strings.Replace(kubeconfig("https://"+address, "system:kube-proxy"), "insecure-skip", fmt.Sprintf("tls-server-name: node-%d, insecure-skip", i), 1))
			client := must.Get(kubernetes.Connect(kubernetes.Connection{Kubeconfig: w.dir + "/instance.conf", QPS: -1}))(w.t)
			go func() {
				_ = kubernetes.New(client, kubernetes.Options{NodeName: "node", Logger: zerolog.Nop()}).Run(run, all[i].apply)
			}()
		}
		w.until("all instances have the slices", func() error { return missing(all, size.services) })
	})
	held, first := memory(w.t, pid, "VmRSS:")-memory0, link.down.Load()
	for i := range all {
		all[i].slices.Store(0)
	}
	changes := spent(func() {
		w.roll(size)
		w.until("all instances have the changes", func() error { return missing(all, size.changes) })
	})
	each := float64(n * size.changes)
	return fmt.Sprintf(`%d instances: each costs the API server
at the start: %.1f ms of CPU, %d KB sent, %.2f MiB of memory
each change: %.1f us of CPU, %.0f B sent; the change itself costs %.2f ms`, n,
		start.Seconds()*1000/float64(n), first>>10/int64(n), held/float64(n),
		(changes-alone).Seconds()*1e6/each, float64(link.down.Load()-first)/each, alone.Seconds()*1000/float64(size.changes))
}

// instance counts the slices that a source was told of.
type instance struct{ slices atomic.Int64 }

func (i *instance) apply(c service.Change) { i.slices.Add(int64(len(c.Slices))) }

func missing(all []instance, want int) error {
	for i := range all {
		if got := all[i].slices.Load(); got < int64(want) {
			return fmt.Errorf("instance %d has %d of %d slices", i, got, want)
		}
	}
	return nil
}

// roll replaces an endpoint in as many slices as there are changes.
func (w *world) roll(size counted) {
	w.t.Helper()
	for i := range size.changes {
		w.changeSlice(fmt.Sprintf("bulk-%d-7k2xq", i), func(s *discoveryv1.EndpointSlice) {
			e := &s.Endpoints[0]
			e.TargetRef.UID += "x"
			e.TargetRef.Name += "x"
		})
	}
}

var watched = regexp.MustCompile(`(?m)^apiserver_longrunning_requests\{.*resource="(\w+)".*verb="WATCH".*\} (\d+)$`)

// watches returns how many watches the API server serves of each kind.
func (w *world) watches() map[string]int {
	w.t.Helper()
	text := must.Get(w.admin.clients[corev1.SchemeGroupVersion].Get().AbsPath("/metrics").Do(ctx).Raw())(w.t)
	kinds := make(map[string]int)
	for _, m := range watched.FindAllStringSubmatch(string(text), -1) {
		n := must.Get(strconv.Atoi(m[2]))(w.t)
		kinds[m[1]] += n
	}
	return kinds
}

// awaitSilence waits until nothing has passed for half a second.
func (w *world) awaitSilence(m *meter) {
	w.t.Helper()
	last := int64(-1)
	w.until("the API server has sent everything", func() error {
		now := m.down.Load()
		defer func() { last = now }()
		if now != last {
			time.Sleep(500 * time.Millisecond)
			return errNotYet
		}
		return nil
	})
}

// meter passes connections on to the API server and counts their bytes.
type meter struct{ up, down atomic.Int64 }

// serve accepts connections until the test ends, and returns where.
func (m *meter) serve(w *world, listen func(network, address string) (net.Listener, error)) string {
	w.t.Helper()
	l := must.Get(listen("tcp", "127.0.0.1:0"))(w.t)
	w.t.Cleanup(func() { _ = l.Close() })
	target := strings.TrimPrefix(apiServer, "https://")
	go netns.Accept(l, func(c net.Conn) {
		server, err := w.hosts.Node.Dial("tcp", target)
		if err != nil {
			_ = c.Close()
			return
		}
		go count(server, c, &m.up)
		go count(c, server, &m.down)
	})
	return l.Addr().String()
}

// count copies, and closes both ends after that.
func count(to, from net.Conn, bytes *atomic.Int64) {
	defer to.Close()
	defer from.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		bytes.Add(int64(n))
		if err != nil {
			return
		}
		if _, err := to.Write(buffer[:n]); err != nil {
			return
		}
	}
}
