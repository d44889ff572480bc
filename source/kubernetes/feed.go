package kubernetes

import (
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/sluice-proxy/sluice/service"
)

// feed collects changed objects from the watches until they are taken. It keeps
// only the last state of each object (A1.18). Safe for concurrent use.
type feed struct {
	wake chan struct{} // holds a token while there is something to take

	mu       sync.Mutex
	objects  map[service.ObjectKey]metav1.Object // nil for one that is gone
	triggers []time.Time
	given    bool // something was taken before, so deletions matter
}

func newFeed() *feed {
	return &feed{wake: make(chan struct{}, 1), objects: make(map[service.ObjectKey]metav1.Object)}
}

// put adds an object, and when its change was triggered; nil means that the object was
// deleted.
func put[T any, P interface {
	*T
	metav1.Object
}](f *feed, kind service.ObjectKind, name service.Name, object P, triggers ...time.Time) {
	k := service.ObjectKey{Kind: kind, Name: name}
	f.mu.Lock()
	switch {
	case object != nil:
		f.objects[k] = object
	case f.given:
		f.objects[k] = nil
	default:
		delete(f.objects, k) // nobody knows it yet
	}
	f.triggers = append(f.triggers, triggers...)
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// take returns everything that has come since the last call.
func (f *feed) take() service.Change {
	f.mu.Lock()
	defer f.mu.Unlock()
	c := service.Change{Triggers: f.triggers}
	for k, object := range f.objects {
		c.Put(k, object)
	}
	f.objects, f.triggers, f.given = make(map[service.ObjectKey]metav1.Object), nil, true
	return c
}

// waiting counts the objects of a kind that wait to be taken.
func (f *feed) waiting(kind service.ObjectKind) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for k := range f.objects {
		if k.Kind == kind {
			n++
		}
	}
	return n
}
