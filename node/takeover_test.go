package node

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/client"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/bpffs"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// takesOver returns what makes proxies for a manifest that take over from each other.
func takesOver(t *testing.T, manifest string) (c Config, begin func() *Proxy) {
	t.Helper()
	root, unmount, err := bpffs.Open()
	must.OK(t, err)
	t.Cleanup(unmount)
	c = config(t, manifest)
	c.AdminSocket, c.Steering.BPFRoot = filepath.Join(t.TempDir(), "admin"), root
	c.TakeOver, c.TakeOverTimeout = true, time.Minute
	return c, func() *Proxy {
		t.Helper()
		return must.Get(New(c, zerolog.New(zerolog.NewTestWriter(t))))(t)
	}
}

// silent is a source that has nothing to say, such as an API server that does not answer.
type silent struct{}

func (silent) Run(ctx context.Context, _ func(service.Change)) error {
	<-ctx.Done()
	return nil
}

// TestTakeOverFromOneWithoutConfiguration: a process that has learnt of no Service hands over as well.
func TestTakeOverFromOneWithoutConfiguration(t *testing.T) {
	if !inOwnNamespace(t) {
		return
	}
	_, begin := takesOver(t, webManifest)
	first := begin()
	first.source = silent{}
	_, stopFirst := run(t, first)
	_, stopNext := run(t, begin())
	wait.For(t, "an answer of the Service", 30*time.Second, askWeb)
	stopFirst()
	if first.successor == nil {
		t.Error("the first process has not handed over")
	}
	stopNext()
}

// late is a source that has nothing to say until its API server is there.
type late struct {
	Objects
	there chan struct{}
}

func (l late) Run(ctx context.Context, apply func(service.Change)) error {
	select {
	case <-l.there:
	case <-ctx.Done():
		return nil
	}
	return l.Objects.Run(ctx, apply)
}

// TestTakeOverWithoutTheAPIServer: the next process cannot learn of Services. The running one serves on, also
// after a signal to end, until the next one has them, or its patience is over. Then the node is without
// a proxy until the next one has them.
func TestTakeOverWithoutTheAPIServer(t *testing.T) {
	if !inOwnNamespace(t) {
		return
	}
	c, begin := takesOver(t, webManifest)
	for _, patience := range []time.Duration{time.Minute, 500 * time.Millisecond} {
		c.TakeOverTimeout = patience
		first := must.Get(New(c, zerolog.New(zerolog.NewTestWriter(t))))(t)
		_, stopFirst := run(t, first)
		wait.For(t, "an answer of the Service", 30*time.Second, askWeb)
		next := begin()
		there := make(chan struct{})
		next.source = late{next.source, there}
		_, stopNext := run(t, next)
		ended := make(chan struct{})
		go func() { defer close(ended); stopFirst() }()
		waits := patience == time.Minute
		if waits {
			for range 100 {
				must.OK(t, askWeb())
			}
		} else {
			<-ended
		}
		close(there)
		wait.For(t, "an answer of the Service", 30*time.Second, askWeb)
		<-ended
		check.Equalf(t, first.successor != nil, waits, "it has handed over")
		stopNext()
	}
}

// TestEndWaitsForATakeOver: a signal to end, while another process takes over, counts once that one
// serves, or is gone.
func TestEndWaitsForATakeOver(t *testing.T) {
	if !inOwnNamespace(t) {
		return
	}
	_, begin := takesOver(t, webManifest)
	first := begin()
	_, stopFirst := run(t, first)
	wait.For(t, "an answer of the Service", 30*time.Second, askWeb)
	next := begin() // it has said hello
	firstEnded := make(chan struct{})
	go func() { defer close(firstEnded); stopFirst() }()
	for range 50 {
		must.OK(t, askWeb())
	}
	_, stopNext := run(t, next)
	for ended := false; !ended; {
		select {
		case <-firstEnded:
			ended = true
		default:
		}
		must.OK(t, askWeb())
	}
	if first.successor == nil {
		t.Error("the first process has not handed over")
	}
	wait.True(t, "the next process serves", func() bool { return next.applied.Load() != 0 })

	last := begin()
	nextEnded := make(chan struct{})
	go func() { defer close(nextEnded); stopNext() }()
	must.OK(t, askWeb())
	_ = last.before.conn.Close() // as if it had died
	<-nextEnded
	if next.successor != nil {
		t.Error("a process that is gone has taken over")
	}
}

// TestDrainDuringATakeOver: what the running process is told after the next one has begun, and
// before it serves, holds in the next one: an address that is drained, and one that is taken back.
func TestDrainDuringATakeOver(t *testing.T) {
	if !inOwnNamespace(t) {
		return
	}
	c, begin := takesOver(t, webManifest+`---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {namespace: shop, name: web-2, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{port: 8080}]
endpoints: [{addresses: [192.0.2.2], nodeName: node}, {addresses: [192.0.2.3], nodeName: node}]
`)
	admin := client.New(c.AdminSocket)
	tell := func(endpoint string, back bool) {
		t.Helper()
		must.OK(t, admin.Act(context.Background(), api.PathDrain, &api.Drain{Endpoint: endpoint, Back: back}, new(api.Drains)))
	}
	first := begin()
	_, stopFirst := run(t, first)
	defer stopFirst()
	wait.For(t, "an answer of the Service", 30*time.Second, askWeb)
	tell("192.0.2.2", false)

	next := begin()
	tell("192.0.2.2", true)
	tell("192.0.2.3", false)
	ctx, stopNext := run(t, next)
	defer stopNext()
	wait.True(t, "the next process serves", func() bool { return next.applied.Load() != 0 })
	var list api.Drains
	must.OK(t, admin.Get(ctx, api.PathDrain, nil, &list))
	if len(list.Drained) != 1 || list.Drained[0].Endpoint != "192.0.2.3" {
		t.Errorf("the next process lists %+v as drained", list.Drained)
	}
	stopFirst()
	var used []string
	must.OK(t, next.onRun(ctx, func() {
		for _, e := range next.table.Balanced(0, service.IPv4) {
			used = append(used, e.Addr.Addr().String())
		}
	}))
	slices.Sort(used)
	check.EqualSlicesf(t, used, []string{"192.0.2.1", "192.0.2.2"}, "new connections go to")
}

// TestServiceManagerIsTold: a service manager learns when a process serves, which one is the service's
// next main process before this one ends, and that the last one stops.
func TestServiceManagerIsTold(t *testing.T) {
	if !inOwnNamespace(t) {
		return
	}
	_, begin := takesOver(t, webManifest)
	told := make(map[*Proxy]*output.Text)
	start := func() (p *Proxy, stop func()) {
		t.Helper()
		p = begin()
		text := &output.Text{}
		told[p] = text
		p.config.Notify = func(state string) bool { _, _ = text.Write([]byte(state + "\n")); return true }
		_, stop = run(t, p)
		wait.True(t, "it serves", func() bool { return text.Contains("READY=1\n") })
		return p, stop
	}
	first, stopFirst := start()
	next, stopNext := start()
	stopFirst() // it has ended
	stopNext()
	check.Equalf(t, told[first].String(), fmt.Sprintf("READY=1\nMAINPID=%d\n", os.Getpid()), "the first process says")
	check.Equalf(t, told[next].String(), "READY=1\nSTOPPING=1\n", "the next process says")
}
