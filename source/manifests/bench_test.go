package manifests

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// patience is how long a test waits for what must come. It is long: the
// machine may be busy with other things.
const patience = 30 * time.Second

// bench runs a Watcher and keeps what it says.
type bench struct {
	t   testing.TB
	dir string
	w   *Watcher

	mu      sync.Mutex
	news    chan struct{}     // closed at the next change or log line
	objects map[string]string // what is in force, with what tells versions apart
	changes []service.Change
	logged  bytes.Buffer
}

// write makes Write of the log and of the bench itself the same.
func (b *bench) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.announceLocked()
	return b.logged.Write(p)
}

func (b *bench) announceLocked() {
	close(b.news)
	b.news = make(chan struct{})
}

func (b *bench) apply(c service.Change) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.changes = append(b.changes, c)
	for _, s := range c.Services {
		b.objects["Service "+s.Namespace+"/"+s.Name] = s.Spec.ClusterIP
	}
	for _, s := range c.EndpointSlices {
		var addresses []string
		for _, e := range s.Endpoints {
			addresses = append(addresses, e.Addresses...)
		}
		b.objects["EndpointSlice "+s.Namespace+"/"+s.Name] = strings.Join(addresses, " ")
	}
	for _, n := range c.Nodes {
		b.objects["Node "+n.Name] = n.Labels["topology.kubernetes.io/zone"]
	}
	for _, s := range c.ServiceCIDRs {
		b.objects["ServiceCIDR "+s.Name] = strings.Join(s.Spec.CIDRs, " ")
	}
	for _, k := range c.Deleted {
		if _, ok := b.objects[k.String()]; !ok {
			b.t.Errorf("%s is deleted and was not there", k)
		}
		delete(b.objects, k.String())
	}
	b.announceLocked()
}

// start runs a Watcher of dir until the test ends. Without events nothing is
// looked at again: what a test sees, it sees by events. An emptied file keeps its
// content for as long as the test takes: write empties a file before it fills it, and
// may be delayed in between. A file system that is late is waited for.
func start(t testing.TB, dir string, adjust ...func(*Watcher)) *bench {
	t.Helper()
	b := &bench{t: t, dir: dir, news: make(chan struct{}), objects: make(map[string]string)}
	b.w = New(dir, Options{Logger: zerolog.New(b)})
	b.w.rescanTime, b.w.emptyGrace, b.w.calls.limit = time.Hour, time.Hour, patience
	for _, a := range adjust {
		a(b.w)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.w.Run(ctx, b.apply) }()
	t.Cleanup(func() {
		cancel()
		check.OKf(t, <-done, "Run")
	})
	b.until("the first change", func() bool { return len(b.changes) > 0 })
	return b
}

// until waits until a condition holds; the condition is called with the lock.
func (b *bench) until(what string, holds func() bool) {
	b.t.Helper()
	deadline := time.After(patience)
	for {
		b.mu.Lock()
		ok, news := holds(), b.news
		b.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-news:
		case <-deadline:
			b.mu.Lock()
			defer b.mu.Unlock()
			b.t.Fatalf("%s did not come; in force: %v\nlog:\n%s", what, b.objects, &b.logged)
		}
	}
}

// has waits until exactly the objects are in force: "Service default/web",
// "10.96.0.1", and so on.
func (b *bench) has(pairs ...string) {
	b.t.Helper()
	want := make(map[string]string)
	for i := 0; i < len(pairs); i += 2 {
		want[pairs[i]] = pairs[i+1]
	}
	b.until(fmt.Sprint(want), func() bool { return maps.Equal(want, b.objects) })
}

func (b *bench) logs(text string) {
	b.t.Helper()
	b.until("the log line "+text, func() bool { return strings.Contains(b.logged.String(), text) })
}

// settled waits until the watcher has looked at the tree once more, by way of a
// file that the test does not use otherwise.
func (b *bench) settled() {
	b.t.Helper()
	name := filepath.Join(b.dir, "zz-settled.yaml")
	write(b.t, name, svc("zz-settled", "10.96.255.254"))
	b.until("the marker", func() bool { return b.objects["Service default/zz-settled"] != "" })
	remove(b.t, name)
	b.until("the marker's end", func() bool { return b.objects["Service default/zz-settled"] == "" })
}

func (b *bench) count(text string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.logged.String(), text)
}

func (b *bench) changeCount() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.changes)
}

func write(t testing.TB, name, text string) {
	t.Helper()
	must.OK(t, os.WriteFile(name, []byte(text), 0o644))
}

// replace writes a file beside and renames it into place, as editors do.
func replace(t testing.TB, name, text string) {
	t.Helper()
	write(t, name+".tmp~", text)
	rename(t, name+".tmp~", name)
}

func rename(t testing.TB, from, to string) {
	t.Helper()
	must.OK(t, os.Rename(from, to))
}

func remove(t testing.TB, name string) {
	t.Helper()
	must.OK(t, os.RemoveAll(name))
}

func mkdir(t testing.TB, name string) {
	t.Helper()
	must.OK(t, os.MkdirAll(name, 0o755))
}

func symlink(t testing.TB, target, name string) {
	t.Helper()
	must.OK(t, os.Symlink(target, name))
}

func svc(name, ip string) string {
	return "apiVersion: v1\nkind: Service\nmetadata:\n  name: " + name + "\nspec:\n  clusterIP: " + ip + "\n  ports:\n  - port: 80\n"
}

func slc(service, name, address string) string {
	return "apiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata:\n  name: " + name +
		"\n  labels:\n    kubernetes.io/service-name: " + service + "\naddressType: IPv4\nports:\n- port: 8080\nendpoints:\n- addresses: [" + address + "]\n"
}

func eps(name, address string) string {
	return "apiVersion: v1\nkind: Endpoints\nmetadata:\n  name: " + name + "\nsubsets:\n- addresses:\n  - ip: " + address + "\n  ports:\n  - port: 8080\n"
}

// fakeNotifier sends the events that a test wants.
type fakeNotifier struct {
	ev  chan fsnotify.Event
	err chan error
	add func(dir string) error
}

func (n *fakeNotifier) Add(dir string) error {
	if n.add != nil {
		return n.add(dir)
	}
	return nil
}
func (n *fakeNotifier) Remove(string) error           { return nil }
func (n *fakeNotifier) Close() error                  { return nil }
func (n *fakeNotifier) events() <-chan fsnotify.Event { return n.ev }
func (n *fakeNotifier) errors() <-chan error          { return n.err }

func with(n *fakeNotifier) func(*Watcher) {
	return func(w *Watcher) { w.newNotifier = func() (notifier, error) { return n, nil } }
}

func mkfifo(t testing.TB, name string) {
	t.Helper()
	must.OK(t, syscall.Mkfifo(name, 0o644))
}
