package datagram

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// Resolvers use a new socket for each question and retry without an answer, while the
// endpoints are replaced continuously: every question gets its own answer. (A connected
// socket receives only from the address that it sent to.)
func TestResolversWhileEndpointsCycle(t *testing.T) {
	const clients, each, tries, pace = 16, 250, 32, 50
	lab := netns.NewLab(t, 3)
	n := newNode(t, lab, func(o *Options) { o.MaxSessions = 500 })
	var eps []netip.AddrPort
	for _, b := range lab.Backends {
		b.EchoUDP(t, 5300)
		eps = append(eps, at(b.IPv4, 5300))
	}
	n.apply(svc("dns", vip4, map[string]string{"udp-responses": "1"}, eps...))
	var again, answered atomic.Int64
	var running sync.WaitGroup
	done := make(chan struct{})
	for i := range clients {
		running.Go(func() {
			for j := range each {
				if err := resolve(lab.Client, fmt.Sprintf("question %d of %d", j, i), tries, &again); err != nil {
					t.Errorf("client %d: %v", i, err)
					return
				}
				answered.Add(1)
			}
		})
	}
	go func() { running.Wait(); close(done) }()
	cycles := 0
	for finished := false; !finished; {
		select {
		case <-done:
			finished = true
		case <-time.After(time.Millisecond):
			// Slowly enough for questions to be answered.
			if answered.Load() >= int64(pace*cycles) {
				cycles++
				n.apply(service.Change{EndpointSlices: endpointSlices("dns", vip4, eps[cycles%3], eps[(cycles+1)%3])})
			}
		}
	}
	t.Logf("%d questions, %d of them asked again, while endpoints changed %d times; %d lost", clients*each, again.Load(), cycles, n.server.Stats().Lost.Load())
	if cycles < 10 {
		t.Errorf("the endpoints changed %d times only", cycles)
	}
}

// resolve asks one question until it is answered.
func resolve(from *netns.Host, question string, tries int, again *atomic.Int64) error {
	c, err := from.Dial("udp", vip4+":53")
	if err != nil {
		return err
	}
	defer c.Close()
	for try := range tries {
		if try > 0 {
			again.Add(1)
		}
		got, err := ask(c, question, 250*time.Millisecond)
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
		case err != nil:
			return err
		case !strings.HasSuffix(got, "\n"+question):
			return fmt.Errorf("%s: answered with %q", question, got)
		default:
			return nil
		}
	}
	return fmt.Errorf("%s: no answer in %d tries", question, tries)
}

// The memory of open, idle sessions is bounded: the promise is 1 KiB each.
func TestIdleSessionsAreSmall(t *testing.T) {
	const sessions, promise = 2000, 1 << 10
	lab := netns.NewLab(t, 1)
	n := newNode(t, lab, func(o *Options) {
		o.MaxSessions, o.MaxServiceSessions = 2*sessions, 2*sessions
		o.Timeout, o.StreamTimeout = time.Hour, time.Hour
	})
	lab.Backends[0].EchoUDP(t, 5300)
	n.apply(svc("dns", vip4, nil, at(lab.Backends[0].IPv4, 5300)))
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapInuse
	}
	open := func(count int) {
		t.Helper()
		for range count {
			c, err := lab.Client.Dial("udp", vip4+":53")
			must.OK(t, err)
			_, err = ask(c, "q", patience)
			_ = c.Close()
			must.OK(t, err)
		}
	}
	open(100)
	before, few := heap(), n.server.Stats().Sessions.Load()
	open(sessions)
	// Some clients reused the port, and so the session, of an earlier one.
	more := n.server.Stats().Sessions.Load() - few
	if more < sessions/2 {
		t.Fatalf("%d sessions are open", more)
	}
	got := int64(heap()-before) / more
	if got > promise {
		t.Errorf("an idle session takes %d bytes of the heap, want at most %d", got, promise)
	}
	t.Logf("%d bytes for each idle session", got)
}
