package health

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/wait"
)

// someSockets are Sockets for all namespaces together.
type someSockets struct {
	mu          sync.Mutex
	most, taken int
}

func (s *someSockets) TakeSockets(_ string, n int) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.taken+n > s.most {
		return fmt.Errorf("there are %d", s.taken)
	}
	s.taken += n
	return nil
}

func (s *someSockets) ReturnSockets(_ string, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.taken -= n
}

func (s *someSockets) inUse() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taken
}

// TestServicePortsAreBounded: ports that there is no room for are counted, some of
// them are named once, and they open when others go. Ports that are not open hold
// nothing.
func TestServicePortsAreBounded(t *testing.T) {
	const most, services = 5, 30
	room := &someSockets{most: most}
	events := 0
	w := newWorld(t, Options{Sockets: room, Retry: time.Millisecond, Event: func(_ service.Name, reason, text string) {
		if reason != "FailedToStartServiceHealthcheck" || !strings.Contains(text, "--max-claims") {
			t.Errorf("event %s: %s", reason, text)
		}
		events++
	}})
	all := service.Change{}
	ports := make(map[uint16]bool)
	for len(ports) < services {
		ports[freePort(t)] = true
	}
	for port := range ports {
		c := balanced(fmt.Sprintf("s%d", port), port, 1)
		all.Services = append(all.Services, c.Services...)
	}
	w.apply(all)
	if got := w.server.Stats(); got.Ports != most || got.PortsWaiting != services-most || room.inUse() != most {
		t.Errorf("%+v, %d sockets are taken", got, room.inUse())
	}
	check.Equalf(t, events, mostNamed, "events")
	w.server.mu.Lock()
	for range 3 { // tried again, nothing is new
		w.server.openPortsLocked()
	}
	w.server.mu.Unlock()
	if log := w.log.String(); strings.Count(log, "FailedToStartServiceHealthcheck") != mostNamed || strings.Count(log, "9 more health check ports") != 1 {
		t.Errorf("the log says %s", log)
	}
	var gone service.Change
	w.server.mu.Lock()
	for k, p := range w.server.ports {
		if p.http != nil {
			gone.Deleted = append(gone.Deleted, service.ObjectKey{Kind: service.KindService, Name: k.service})
		}
	}
	w.server.mu.Unlock()
	room.mu.Lock()
	room.most = services
	room.mu.Unlock()
	w.apply(gone)
	wait.True(t, "the others are open", func() bool {
		got := w.server.Stats()
		return got.Ports == services-most && got.PortsWaiting == 0
	})
	if log := w.log.String(); strings.Count(log, "is open now") != mostNamed {
		t.Errorf("the log says %s", log)
	}
	w.server.Close()
	check.Equalf(t, room.inUse(), 0, "sockets are taken after the end")
}

// TestFailedPortReturnsItsSockets: a port that cannot be opened holds nothing.
func TestFailedPortReturnsItsSockets(t *testing.T) {
	room := &someSockets{most: 1}
	w := newWorld(t, Options{Sockets: room, Listen: nowhere})
	w.apply(balanced("web", freePort(t), 1))
	if got := w.server.Stats(); got.Ports != 0 || got.PortsWaiting != 0 || got.PortFailures == 0 || room.inUse() != 0 {
		t.Errorf("%+v, %d sockets are taken", got, room.inUse())
	}
}

func nowhere(string, string) (net.Listener, error) { return nil, errors.New("nowhere") }
