package kubernetes

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/sluice-proxy/sluice/service"
)

// box is where the watch of one kind puts its objects: it passes on what is new
// and keeps no object, only names and resource versions, so that a new list can
// be compared with what was passed on. One reflector at a time uses it, from one
// goroutine.
type box[T any, P interface {
	*T
	metav1.Object
}] struct {
	trim func(P)
	// put passes on an object; nil means that it is gone.
	put func(service.Name, P)
	// listed is called after each list, with how many objects were new,
	// different or gone.
	listed func(changed int)

	known map[service.Name]edition
}

// edition is one state of an object. An object that is made anew under the name
// of another may have its resource version too, once the API server's store was
// set up afresh, but never its UID.
type edition struct{ version, uid string }

func newBox[T any, P interface {
	*T
	metav1.Object
}](trim func(P), put func(service.Name, P), listed func(changed int)) *box[T, P] {
	return &box[T, P]{trim: trim, put: put, listed: listed, known: make(map[service.Name]edition)}
}

// Transformer implements cache.TransformingStore: objects are trimmed one by
// one as they are decoded, so that a list is never there in full.
func (b *box[T, P]) Transformer() cache.TransformFunc {
	return func(object any) (any, error) {
		if p, ok := object.(P); ok {
			b.trim(p)
		}
		return object, nil
	}
}

// nameOf gives the name of what a reflector brings.
func nameOf(o metav1.Object) service.Name {
	return service.Name{Namespace: o.GetNamespace(), Name: o.GetName()}
}

func (b *box[T, P]) object(object any) (P, error) {
	p, ok := object.(P)
	if !ok {
		return nil, fmt.Errorf("a %T came where %T was expected", object, p)
	}
	return p, nil
}

// set passes an object on unless it was passed on already, and tells whether it
// was not.
func (b *box[T, P]) set(p P) bool {
	name, this := nameOf(p), edition{p.GetResourceVersion(), string(p.GetUID())}
	if known, ok := b.known[name]; ok && known == this && this.version != "" {
		return false
	}
	b.trim(p)
	b.known[name] = this
	b.put(name, p)
	return true
}

// Add implements cache.ReflectorStore.
func (b *box[T, P]) Add(object any) error {
	p, err := b.object(object)
	if err == nil {
		b.set(p)
	}
	return err
}

// Update implements cache.ReflectorStore.
func (b *box[T, P]) Update(object any) error { return b.Add(object) }

// Delete implements cache.ReflectorStore.
func (b *box[T, P]) Delete(object any) error {
	p, err := b.object(object)
	if err == nil {
		b.forget(nameOf(p))
	}
	return err
}

func (b *box[T, P]) forget(name service.Name) {
	if _, ok := b.known[name]; ok {
		delete(b.known, name)
		b.put(name, nil)
	}
}

// Replace implements cache.ReflectorStore: what is not in the list is gone.
func (b *box[T, P]) Replace(objects []any, _ string) error {
	changed, there := 0, make(map[service.Name]struct{}, len(objects))
	for _, object := range objects {
		p, err := b.object(object)
		if err != nil {
			return err
		}
		there[nameOf(p)] = struct{}{}
		if b.set(p) {
			changed++
		}
	}
	for name := range b.known {
		if _, ok := there[name]; !ok {
			b.forget(name)
			changed++
		}
	}
	b.listed(changed)
	return nil
}

// clear says that everything is gone.
func (b *box[T, P]) clear() {
	for name := range b.known {
		b.forget(name)
	}
}

// Resync implements cache.ReflectorStore. Nothing is ever passed on again.
func (b *box[T, P]) Resync() error { return nil }
