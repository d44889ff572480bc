package kubernetes

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"github.com/sluice-proxy/sluice/service"
)

// feed collects changed objects from the watches until they are taken. It keeps
// only the last state of each object (A1.18). Safe for concurrent use.
type feed struct {
	wake chan struct{} // holds a token while there is something to take

	mu       sync.Mutex
	services map[service.Name]*corev1.Service // nil for one that is gone
	slices   map[service.Name]*discoveryv1.EndpointSlice
	nodes    map[service.Name]*corev1.Node
	cidrs    map[service.Name]*networkingv1.ServiceCIDR
	triggers []time.Time
	given    bool // something was taken before, so deletions matter
}

func newFeed() *feed {
	f := &feed{wake: make(chan struct{}, 1)}
	f.resetLocked()
	return f
}

func (f *feed) resetLocked() {
	f.services = make(map[service.Name]*corev1.Service)
	f.slices = make(map[service.Name]*discoveryv1.EndpointSlice)
	f.nodes = make(map[service.Name]*corev1.Node)
	f.cidrs = make(map[service.Name]*networkingv1.ServiceCIDR)
	f.triggers = nil
}

// edit calls change under the lock, and wakes the taker.
func (f *feed) edit(change func()) {
	f.mu.Lock()
	change()
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// put adds an object; nil means that it was deleted.
func put[T any](f *feed, objects *map[service.Name]*T, name service.Name, object *T) {
	f.edit(func() { putLocked(f, objects, name, object) })
}

func putLocked[T any](f *feed, objects *map[service.Name]*T, name service.Name, object *T) {
	if object == nil && !f.given {
		delete(*objects, name) // nobody knows it yet
		return
	}
	(*objects)[name] = object
}

// take returns everything that has come since the last call.
func (f *feed) take() service.Change {
	f.mu.Lock()
	defer f.mu.Unlock()
	var c service.Change
	c.Services = drain(f.services, service.KindService, &c)
	c.EndpointSlices = drain(f.slices, service.KindEndpointSlice, &c)
	c.Nodes = drain(f.nodes, service.KindNode, &c)
	c.ServiceCIDRs = drain(f.cidrs, service.KindServiceCIDR, &c)
	c.Triggers = f.triggers
	f.resetLocked()
	f.given = true
	return c
}

// drain returns the objects that exist, and adds the deleted ones to the change.
func drain[T any](objects map[service.Name]*T, kind service.ObjectKind, c *service.Change) []*T {
	var out []*T
	for name, object := range objects {
		if object == nil {
			c.Deleted = append(c.Deleted, service.ObjectKey{Kind: kind, Name: name})
		} else {
			out = append(out, object)
		}
	}
	return out
}

// waiting counts the Services and EndpointSlices that wait to be taken.
func (f *feed) waiting() (services, slices int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.services), len(f.slices)
}
