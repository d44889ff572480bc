package kubernetes

import (
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
)

// fakeAPI is an API server of a few kinds, which lists and watches as the real
// one does: streaming lists, bookmarks, resource versions that expire. It
// answers in JSON.
type fakeAPI struct {
	server *httptest.Server

	mu       sync.Mutex
	changed  *sync.Cond
	version  int
	oldest   int               // versions before it have expired
	objects  map[string]object // by path, "services/default/web"
	events   []event
	forbid   map[string]bool     // resources
	cut      int                 // raised to break off all watches
	requests map[string][]string // by resource, the queries
	noStream bool                // refuse streaming lists, as old servers do
	breaks   int                 // lists break off after so many objects; 0 for none
	broken   int                 // lists that did
}

type object interface {
	metav1.Object
	runtime.Object
}

type event struct {
	version  int
	resource string
	kind     string
	object   object
}

func newFakeAPI(t *testing.T) *fakeAPI {
	f := &fakeAPI{version: 100, objects: make(map[string]object), forbid: make(map[string]bool), requests: make(map[string][]string)}
	f.changed = sync.NewCond(&f.mu)
	f.server = httptest.NewServer(f)
	t.Cleanup(func() {
		f.breakOff()
		f.server.CloseClientConnections()
		f.server.Close()
	})
	return f
}

func path(resource string, o metav1.Object) string {
	return resource + "/" + o.GetNamespace() + "/" + o.GetName()
}

// put creates or updates an object.
func (f *fakeAPI) put(resource string, o object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	o.SetResourceVersion(strconv.Itoa(f.version))
	kind := "ADDED"
	if _, ok := f.objects[path(resource, o)]; ok {
		kind = "MODIFIED"
	}
	f.objects[path(resource, o)] = o
	f.events = append(f.events, event{f.version, resource, kind, o})
	f.changed.Broadcast()
}

// remove deletes an object; with quietly, no watch is told, as when it happens
// while nobody watches and the history is lost.
func (f *fakeAPI) remove(resource string, o object, quietly bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	delete(f.objects, path(resource, o))
	if !quietly {
		gone := o.DeepCopyObject().(object)
		gone.SetResourceVersion(strconv.Itoa(f.version))
		f.events = append(f.events, event{f.version, resource, "DELETED", gone})
	}
	f.changed.Broadcast()
}

// expire forgets the history, so that a watch from before is too old.
func (f *fakeAPI) expire() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version++
	f.oldest = f.version
	f.events = nil
}

// restore puts a backup of the store into place: objects with the versions that they had
// then, and a version from which the next changes count. The server breaks off all
// watches, as it is restarted.
func (f *fakeAPI) restore(version int, objects map[string]object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.version, f.oldest, f.events, f.objects = version, 0, nil, objects
	f.cut++
	f.changed.Broadcast()
}

// backup returns what restore takes.
func (f *fakeAPI) backup() (version int, objects map[string]object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.version, maps.Clone(f.objects)
}

// breakOff ends all watches.
func (f *fakeAPI) breakOff() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.cut++
	f.changed.Broadcast()
}

func (f *fakeAPI) setForbidden(resource string, on bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.forbid[resource] = on
}

func (f *fakeAPI) setBreakAfter(objects int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.breaks = objects
}

func (f *fakeAPI) brokenLists() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.broken
}

// replaceQuietly puts an object in another's place, version and all, and tells
// nobody. An object without a version gets the next one.
func (f *fakeAPI) replaceQuietly(resource string, o object) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if o.GetResourceVersion() == "" {
		f.version++
		o.SetResourceVersion(strconv.Itoa(f.version))
	}
	f.objects[path(resource, o)] = o
}

func (f *fakeAPI) queries(resource string) []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.requests[resource]...)
}

func (f *fakeAPI) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	resource, q := parts[len(parts)-1], r.URL.Query()
	metadata := strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadata")
	if metadata {
		resource = "metadata of " + resource
	}
	f.mu.Lock()
	f.requests[resource] = append(f.requests[resource], r.URL.RawQuery)
	forbidden, noStream := f.forbid[resource], f.noStream
	f.mu.Unlock()
	resource = strings.TrimPrefix(resource, "metadata of ")
	selector, err := labels.Parse(q.Get("labelSelector"))
	from, _ := strconv.Atoi(q.Get("resourceVersion"))
	wanted := func(o object) bool {
		name, one := strings.CutPrefix(q.Get("fieldSelector"), "metadata.name=")
		node, ofNode := strings.CutPrefix(q.Get("fieldSelector"), "spec.nodeName=")
		if p, ok := o.(*corev1.Pod); ofNode && (!ok || p.Spec.NodeName != node) {
			return false
		}
		return selector.Matches(labels.Set(o.GetLabels())) && (!one || o.GetName() == name)
	}
	encode := func(o object) any {
		if metadata {
			return &metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{APIVersion: "meta.k8s.io/v1", Kind: "PartialObjectMetadata"},
				ObjectMeta: metav1.ObjectMeta{Name: o.GetName(), ResourceVersion: o.GetResourceVersion(), Labels: o.GetLabels()}}
		}
		return o
	}
	f.mu.Lock()
	tooLarge := from > f.version
	f.mu.Unlock()
	watching, streaming := q.Get("watch") == "true" || q.Get("watch") == "1", q.Get("sendInitialEvents") == "true"
	switch {
	case err != nil:
		f.fail(w, http.StatusBadRequest, metav1.StatusReasonBadRequest, err.Error())
	case forbidden:
		f.fail(w, http.StatusForbidden, metav1.StatusReasonForbidden, resource+" is forbidden")
	case streaming && noStream:
		f.fail(w, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid, "sendInitialEvents is forbidden")
	case tooLarge && (streaming || !watching):
		f.fail(w, http.StatusGatewayTimeout, metav1.StatusReasonTimeout, string(metav1.CauseTypeResourceVersionTooLarge))
	case watching: // a version that is too large is no fault: the watch waits for it
		f.watch(w, r, resource, from, streaming, wanted, encode)
	default:
		f.list(w, resource, wanted, encode)
	}
}

func (f *fakeAPI) fail(w http.ResponseWriter, code int32, reason metav1.StatusReason, text string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(int(code))
	_ = json.NewEncoder(w).Encode(metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: metav1.StatusFailure, Code: code, Reason: reason, Message: text,
		Details: &metav1.StatusDetails{Causes: []metav1.StatusCause{{Type: metav1.CauseType(text), Message: text}}},
	})
}

var listKinds = map[string][2]string{
	"services": {"v1", "ServiceList"}, "nodes": {"v1", "NodeList"}, "pods": {"v1", "PodList"},
	"endpointslices": {"discovery.k8s.io/v1", "EndpointSliceList"}, "servicecidrs": {"networking.k8s.io/v1", "ServiceCIDRList"},
}

func (f *fakeAPI) list(w http.ResponseWriter, resource string, wanted func(object) bool, encode func(object) any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	items := []any{}
	for p, o := range f.objects {
		if strings.HasPrefix(p, resource+"/") && wanted(o) {
			items = append(items, encode(o))
		}
	}
	kind := listKinds[resource]
	w.Header().Set("Content-Type", "application/json")
	if f.breaks > 0 && len(items) > f.breaks {
		f.broken++
		text, _ := json.Marshal(items[:f.breaks])
		_, _ = w.Write(text[:len(text)-1])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{
		"apiVersion": kind[0], "kind": kind[1], "metadata": map[string]any{"resourceVersion": strconv.Itoa(f.version)}, "items": items,
	})
}

func (f *fakeAPI) watch(w http.ResponseWriter, r *http.Request, resource string, from int, streaming bool, wanted func(object) bool, encode func(object) any) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !streaming && from < f.oldest { // or it would wait for what is forgotten
		f.fail(w, http.StatusGone, metav1.StatusReasonExpired, "too old resource version")
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	out := json.NewEncoder(w)
	send := func(kind string, o any) {
		_ = out.Encode(map[string]any{"type": kind, "object": o})
		w.(http.Flusher).Flush()
	}
	stop := make(chan struct{})
	defer close(stop)
	go func() { // wakes the loop below when the client has gone
		select {
		case <-r.Context().Done():
			f.mu.Lock() // or the loop could miss it on its way to wait
			defer f.mu.Unlock()
			f.changed.Broadcast()
		case <-stop:
		}
	}()
	if streaming {
		sent := 0
		for p, o := range f.objects {
			if strings.HasPrefix(p, resource+"/") && wanted(o) {
				if sent++; f.breaks > 0 && sent > f.breaks {
					f.broken++
					panic(http.ErrAbortHandler)
				}
				send("ADDED", encode(o))
			}
		}
		from = f.version
		kind := strings.TrimSuffix(listKinds[resource][1], "List")
		send("BOOKMARK", map[string]any{"apiVersion": listKinds[resource][0], "kind": kind, "metadata": map[string]any{
			"resourceVersion": strconv.Itoa(from), "creationTimestamp": nil,
			"annotations": map[string]string{metav1.InitialEventsAnnotationKey: "true"}}})
	} else {
		w.(http.Flusher).Flush()
	}
	for cut := f.cut; f.cut == cut && r.Context().Err() == nil; f.changed.Wait() {
		for _, e := range f.events {
			if e.version > from && e.resource == resource && wanted(e.object) {
				send(e.kind, encode(e.object))
			}
		}
		from = max(from, f.version)
	}
}
