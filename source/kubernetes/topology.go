package kubernetes

import (
	"context"
	"maps"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"

	"github.com/sluice-proxy/sluice/service"
)

// topology watches the labels of all nodes while a Service selects endpoints by
// them. In a large cluster this is most of the watch traffic, so it runs only when
// needed.
type topology struct {
	source *Source
	wanted chan bool // holds what is wanted until it is seen to
	needed atomic.Bool
	nodes  allNodes

	// What follows belongs to the goroutine that watches Services.
	services map[service.Name]struct{} // those with topology keys
}

func newTopology(s *Source) *topology {
	t := &topology{source: s, wanted: make(chan bool, 1), services: make(map[service.Name]struct{})}
	t.nodes = t.allNodes()
	return t
}

// note checks a Service for topology keys; nil is a deleted one.
func (t *topology) note(name service.Name, svc *corev1.Service) {
	before := len(t.services) > 0
	if svc != nil && svc.Annotations[topologyAnnotation] != "" {
		t.services[name] = struct{}{}
	} else {
		delete(t.services, name)
	}
	if now := len(t.services) > 0; now != before {
		t.needed.Store(now)
		select {
		case <-t.wanted: // nobody has seen to it yet, and now it does not count
		default:
		}
		t.wanted <- now
	}
}

// run starts and stops the watch of all nodes.
func (t *topology) run(ctx context.Context) {
	for {
		select {
		case wanted := <-t.wanted:
			if !wanted {
				continue
			}
		case <-ctx.Done():
			return
		}
		watching, stop := context.WithCancel(ctx)
		stopped := make(chan struct{})
		go func() {
			defer close(stopped)
			t.nodes.watcher.run(watching, t.source.link)
		}()
		for wanted := true; wanted; {
			select {
			case wanted = <-t.wanted:
			case <-ctx.Done():
				wanted = false
			}
		}
		stop()
		<-stopped
		t.nodes.box.clear()
		t.source.link.forget(t.nodes.watcher.kind)
	}
}

type allNodes struct {
	watcher *watcher
	box     *box[metav1.PartialObjectMetadata, *metav1.PartialObjectMetadata]
}

// allNodes prepares the watch of the labels of all nodes but our own, whose object
// is watched already.
func (t *topology) allNodes() allNodes {
	w := &watcher{kind: "labels of all nodes", optional: true, object: &metav1.PartialObjectMetadata{}, settled: make(chan struct{})}
	labels := make(map[string]map[string]string)
	b := newBox(trimmed(trimMetadata), func(name service.Name, m *metav1.PartialObjectMetadata) {
		if name.Name == t.source.options.NodeName {
			return
		}
		if m == nil {
			delete(labels, name.Name)
			put[corev1.Node](t.source.feed, service.KindNode, name, nil)
			return
		}
		if last, ok := labels[name.Name]; ok && maps.Equal(last, m.Labels) {
			return // something else of it changed, as it does all the time
		}
		labels[name.Name] = m.Labels
		put(t.source.feed, service.KindNode, name, &corev1.Node{ObjectMeta: m.ObjectMeta})
	}, func(int) { w.settle() })
	w.into = b
	w.from = &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return t.source.client.metadata.Resource(nodesResource).List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return t.source.client.metadata.Resource(nodesResource).Watch(ctx, o)
		},
	}
	return allNodes{watcher: w, box: b}
}

var nodesResource = corev1.SchemeGroupVersion.WithResource("nodes")
