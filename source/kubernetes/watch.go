package kubernetes

import (
	"context"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
)

// backoff sets the pauses between attempts to reach the API server. They grow and
// are random, so that the nodes of a cluster do not all come at once when it is
// back.
var backoff = wait.Backoff{Duration: 250 * time.Millisecond, Factor: 2, Jitter: 1, Steps: 1 << 20, Cap: 8 * time.Second}

// watcher follows the objects of one kind.
type watcher struct {
	// kind names the objects in messages: "services".
	kind string
	// object is an empty object of the kind.
	object runtime.Object
	// from lists and watches; into receives the objects.
	from cache.ListerWatcherWithContext
	into store
	// selector narrows requests.
	selector selector
	// settled is closed once the objects are listed; of an optional kind, also
	// when the server does not have or show them.
	settled  chan struct{}
	optional bool

	// Of the reflector's goroutine: when the last watch had to end, and the resource
	// version that the server's store no longer reaches, because a backup of the store
	// was restored.
	due  time.Time
	lost string
}

// store is what receives the objects: a box.
type store interface {
	cache.TransformingStore
	doubt()
}

// selector narrows a list or watch to some objects.
type selector struct{ labels, fields string }

// resource returns a ListerWatcher for a resource by its plural name.
func resource(c rest.Interface, plural string) cache.ListerWatcherWithContext {
	return cache.NewFilteredListWatchFromClient(c, plural, metav1.NamespaceAll, func(*metav1.ListOptions) {})
}

// run lists and watches until ctx ends, through all errors.
func (w *watcher) run(ctx context.Context, link *link) {
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			w.selector.apply(&o)
			w.pastLost(&o)
			list, err := w.from.ListWithContext(asker{link, w.kind}.context(ctx), o)
			err = link.answered(ctx, w.kind, err)
			w.settleAfter(err)
			return list, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			w.selector.apply(&o)
			w.pastLost(&o)
			if err := w.checkHistory(ctx, link, o); err != nil {
				return nil, err
			}
			watched, err := w.from.WatchWithContext(asker{link, w.kind}.context(ctx), o)
			if answer := link.answered(ctx, w.kind, err); answer != nil && err == nil {
				watched.Stop()
				watched, err = nil, answer
			}
			w.settleAfter(err)
			return watched, err
		},
	}
	own := backoff
	cache.NewReflectorWithOptions(lw, w.object, w.into, cache.ReflectorOptions{
		Name: "sluice", TypeDescription: w.kind, Backoff: &own,
	}).RunWithContext(ctx)
}

// checkHistory returns an error that has the reflector list everything anew if a watch
// cannot continue because the server's store is at an older version than the watch: a
// backup was restored. The server would accept the watch and tell nothing until its
// store has passed that version. A restore breaks the connections, so the check, which is
// one request, follows only watches that ended before their time.
func (w *watcher) checkHistory(ctx context.Context, link *link, o metav1.ListOptions) error {
	early := time.Now().Before(w.due)
	w.due = time.Time{}
	if o.TimeoutSeconds != nil {
		w.due = time.Now().Add(time.Duration(*o.TimeoutSeconds) * time.Second)
	}
	ours, err := strconv.ParseUint(o.ResourceVersion, 10, 64)
	if !early || err != nil || o.SendInitialEvents != nil {
		return nil //nolint:nilerr // not a version that can be compared, or nothing to check
	}
	head := metav1.ListOptions{Limit: 1}
	w.selector.apply(&head)
	list, err := w.from.ListWithContext(asker{link, w.kind}.context(ctx), head)
	if err := link.answered(ctx, w.kind, err); err != nil {
		w.due = time.Now().Add(time.Hour) // look again with the next attempt
		return err
	}
	access, err := meta.ListAccessor(list)
	if err != nil {
		return nil //nolint:nilerr // no list, so nothing to compare with
	}
	theirs, err := strconv.ParseUint(access.GetResourceVersion(), 10, 64)
	if err != nil || theirs >= ours {
		return nil //nolint:nilerr // not a version that can be compared
	}
	w.lost = o.ResourceVersion
	w.into.doubt()
	link.restored(w.kind, theirs, ours)
	return apierrors.NewResourceExpired("the server's store was restored")
}

// pastLost has a request ask for what the server has now, if it asks for a version that
// the server's store no longer reaches.
func (w *watcher) pastLost(o *metav1.ListOptions) {
	if w.lost != "" && o.ResourceVersion == w.lost {
		o.ResourceVersion = ""
	}
}

func (s selector) apply(o *metav1.ListOptions) { o.LabelSelector, o.FieldSelector = s.labels, s.fields }

// settleAfter stops waiting for an optional kind that the server does not have or
// does not show us, so that the others need not wait for it.
func (w *watcher) settleAfter(err error) {
	if !w.optional {
		return
	}
	if apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
		w.settle()
	}
}

// settle is called from the watcher's goroutine only.
func (w *watcher) settle() {
	select {
	case <-w.settled:
	default:
		close(w.settled)
	}
}
