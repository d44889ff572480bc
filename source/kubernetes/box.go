package kubernetes

import (
	"fmt"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/sluice-proxy/sluice/service"
)

// box receives the objects of one kind from a reflector and passes on those that
// are new. It keeps names and resource versions, no objects, so that it can compare
// a new list with what it has passed on. One reflector at a time uses it, from one
// goroutine.
type box[T any, P interface {
	*T
	metav1.Object
}] struct {
	// read returns what to pass on of an object that the API server sent. It also takes
	// what it has returned.
	read func(any) (P, bool)
	// put passes on an object; nil means that the object was deleted.
	put func(service.Name, P)
	// listed is called after each list, with the number of objects that were
	// new, changed or deleted.
	listed func(changed int)

	known map[service.Name]edition
}

// edition identifies one state of an object. After the API server's store was
// rebuilt, a new object may have the name and the resource version of an old one,
// but never its UID.
type edition struct{ version, uid string }

func newBox[T any, P interface {
	*T
	metav1.Object
}](read func(any) (P, bool), put func(service.Name, P), listed func(changed int)) *box[T, P] {
	return &box[T, P]{read: read, put: put, listed: listed, known: make(map[service.Name]edition)}
}

// trimmed reads objects by a function that empties the fields that nobody reads.
func trimmed[P any](trim func(P)) func(any) (P, bool) {
	return func(object any) (P, bool) {
		p, ok := object.(P)
		if ok {
			trim(p)
		}
		return p, ok
	}
}

// Transformer implements cache.TransformingStore: it reads each object when it is
// decoded, so that memory never holds a whole list of what the server sent.
func (b *box[T, P]) Transformer() cache.TransformFunc {
	return func(object any) (any, error) {
		if p, ok := b.read(object); ok {
			return p, nil
		}
		return object, nil
	}
}

// nameOf returns the name of an object.
func nameOf(o metav1.Object) service.Name {
	return service.Name{Namespace: o.GetNamespace(), Name: o.GetName()}
}

// set passes an object on, unless it has done so already, and reports whether it
// did.
func (b *box[T, P]) set(object any) (name service.Name, did bool, err error) {
	o, ok := object.(metav1.Object)
	if !ok {
		return name, false, fmt.Errorf("a %T came, which is no object", object)
	}
	name, this := nameOf(o), edition{o.GetResourceVersion(), string(o.GetUID())}
	if known, ok := b.known[name]; ok && known == this && this.version != "" {
		return name, false, nil
	}
	p, ok := b.read(object)
	if !ok {
		return name, false, fmt.Errorf("a %T came where %T was expected", object, p)
	}
	b.known[name] = this
	b.put(name, p)
	return name, true, nil
}

// Add implements cache.ReflectorStore.
func (b *box[T, P]) Add(object any) error {
	_, _, err := b.set(object)
	return err
}

// Update implements cache.ReflectorStore.
func (b *box[T, P]) Update(object any) error { return b.Add(object) }

// Delete implements cache.ReflectorStore.
func (b *box[T, P]) Delete(object any) error {
	o, ok := object.(metav1.Object)
	if !ok {
		return fmt.Errorf("a %T is gone, which is no object", object)
	}
	b.forget(nameOf(o))
	return nil
}

func (b *box[T, P]) forget(name service.Name) {
	if _, ok := b.known[name]; ok {
		delete(b.known, name)
		b.put(name, nil)
	}
}

// Replace implements cache.ReflectorStore: objects that are not in the list were
// deleted.
func (b *box[T, P]) Replace(objects []any, _ string) error {
	changed, there := 0, make(map[service.Name]struct{}, len(objects))
	for _, object := range objects {
		name, did, err := b.set(object)
		if err != nil {
			return err
		}
		there[name] = struct{}{}
		if did {
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

// doubt has the next list pass on every object: after the server's store was restored, an
// object may have a version that it had before with another content.
func (b *box[T, P]) doubt() {
	for name := range b.known {
		b.known[name] = edition{}
	}
}

// clear passes on that all objects are gone.
func (b *box[T, P]) clear() {
	for name := range b.known {
		b.forget(name)
	}
}

// Resync implements cache.ReflectorStore. It does nothing: objects are passed on once.
func (b *box[T, P]) Resync() error { return nil }
