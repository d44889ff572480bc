package scale

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/watch"
)

// api implements as much of an API server as a service proxy needs: it lists and
// watches a few kinds, in protobuf, the real one's default. Lists are encoded in
// advance.
type api struct {
	server   http.Server
	listener net.Listener

	mu      sync.Mutex
	version int
	lists   map[string]*list         // by resource; never changes
	watches map[string][]chan []byte // by resource; frames for each watcher
	closed  chan struct{}
}

// list holds a resource's objects at the start.
type list struct {
	whole  []byte // in one answer
	stream []byte // as the first frames of a watch
}

const watchQueue = 1 << 14

var codec = protobuf.NewSerializer(nil, nil)

// newAPI serves a cluster on a listener.
func newAPI(l net.Listener, c *cluster) (*api, error) {
	var services []corev1.Service
	var slices []discoveryv1.EndpointSlice
	for i := range c.Services {
		services, slices = append(services, *c.service(i)), append(slices, *c.slice(i))
	}
	return serve(l, services, slices, *c.node(), *c.cidr())
}

// Serve answers on a listener as an API server with one Service, and with others whose endpoints do
// not answer. The caller closes the listener.
func Serve(l net.Listener, others Size, service corev1.Service, slice discoveryv1.EndpointSlice, node corev1.Node) error {
	c := &cluster{Size: Size{others.Services + 2, others.Each}}
	services, slices := []corev1.Service{service}, []discoveryv1.EndpointSlice{slice}
	for i := 1; i <= others.Services; i++ { // 0 has the first cluster IP, which the world's Service has
		services, slices = append(services, *c.service(i)), append(slices, *c.slice(i))
	}
	_, err := serve(l, services, slices, node, *c.cidr())
	return err
}

func serve(l net.Listener, services []corev1.Service, slices []discoveryv1.EndpointSlice, node corev1.Node, cidr networkingv1.ServiceCIDR) (*api, error) {
	a := &api{
		listener: l, version: 1, closed: make(chan struct{}),
		lists: make(map[string]*list), watches: make(map[string][]chan []byte),
	}
	about := metav1.ListMeta{ResourceVersion: "1"}
	for resource, objects := range map[string]runtime.Object{
		"services":       &corev1.ServiceList{TypeMeta: typeMeta("v1", "ServiceList"), ListMeta: about, Items: services},
		"endpointslices": &discoveryv1.EndpointSliceList{TypeMeta: typeMeta("discovery.k8s.io/v1", "EndpointSliceList"), ListMeta: about, Items: slices},
		"nodes":          &corev1.NodeList{TypeMeta: typeMeta("v1", "NodeList"), ListMeta: about, Items: []corev1.Node{node}},
		"servicecidrs":   &networkingv1.ServiceCIDRList{TypeMeta: typeMeta("networking.k8s.io/v1", "ServiceCIDRList"), ListMeta: about, Items: []networkingv1.ServiceCIDR{cidr}},
	} {
		encoded, err := encodeList(objects)
		if err != nil {
			return nil, err
		}
		a.lists[resource] = encoded
	}
	a.server = http.Server{Handler: a, ReadHeaderTimeout: time.Minute}
	go func() { _ = a.server.Serve(l) }()
	return a, nil
}

func typeMeta(version, kind string) metav1.TypeMeta {
	return metav1.TypeMeta{APIVersion: version, Kind: kind}
}

func (a *api) url() string { return "http://" + a.listener.Addr().String() }

func (a *api) close() {
	close(a.closed)
	_ = a.server.Close()
}

func encode(o runtime.Object) ([]byte, error) {
	var b bytes.Buffer
	if err := codec.Encode(o, &b); err != nil {
		return nil, fmt.Errorf("encode %T: %w", o, err)
	}
	return b.Bytes(), nil
}

// encodeList encodes a list in both forms. In a stream the objects follow one by
// one, and a bookmark marks their end.
func encodeList(objects runtime.Object) (*list, error) {
	whole, err := encode(objects)
	if err != nil {
		return nil, err
	}
	l := &list{whole: whole}
	var mark runtime.Object
	err = meta.EachListItem(objects, func(o runtime.Object) error {
		frame, err := encodeEvent(string(watch.Added), o)
		l.stream = append(l.stream, frame...)
		mark = o
		return err
	})
	if err != nil {
		return nil, err
	}
	mark = mark.DeepCopyObject()
	about, err := meta.Accessor(mark)
	if err != nil {
		return nil, err
	}
	about.SetAnnotations(map[string]string{metav1.InitialEventsAnnotationKey: "true"})
	frame, err := encodeEvent(string(watch.Bookmark), mark)
	l.stream = append(l.stream, frame...)
	return l, err
}

// encodeEvent returns a watch's frame with an event of an object.
func encodeEvent(kind string, o runtime.Object) ([]byte, error) {
	text, err := encode(o)
	if err != nil {
		return nil, err
	}
	event := metav1.WatchEvent{Type: kind, Object: runtime.RawExtension{Raw: text}}
	body, err := event.Marshal()
	if err != nil {
		return nil, err
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...), nil
}

// ServeHTTP answers lists, also as streams, and watches. It refuses all other
// requests.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	resource := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	a.mu.Lock()
	list, known := a.lists[resource]
	a.mu.Unlock()
	switch {
	case !known || r.Method != http.MethodGet || strings.Contains(r.Header.Get("Accept"), "PartialObjectMetadata"):
		a.fail(w, http.StatusNotFound, metav1.StatusReasonNotFound)
	case q.Get("watch") == "true" || q.Get("watch") == "1":
		var first []byte
		if q.Get("sendInitialEvents") == "true" {
			first = list.stream
		}
		a.watch(w, r, resource, first)
	default:
		w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
		_, _ = w.Write(list.whole)
	}
}

func (a *api) fail(w http.ResponseWriter, code int32, reason metav1.StatusReason) {
	text, err := encode(&metav1.Status{TypeMeta: typeMeta("v1", "Status"), Status: metav1.StatusFailure, Code: code, Reason: reason})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	w.WriteHeader(int(code))
	_, _ = w.Write(text)
}

// watch sends the first frames, and then the changes.
func (a *api) watch(w http.ResponseWriter, r *http.Request, resource string, first []byte) {
	frames := make(chan []byte, watchQueue)
	a.mu.Lock()
	a.watches[resource] = append(a.watches[resource], frames)
	a.mu.Unlock()
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf+";stream=watch")
	w.WriteHeader(http.StatusOK)
	flush := http.NewResponseController(w).Flush
	if _, err := w.Write(first); err != nil || flush() != nil {
		return
	}
	for {
		select {
		case frame := <-frames:
			if _, err := w.Write(frame); err != nil || flush() != nil {
				return
			}
		case <-r.Context().Done():
			return
		case <-a.closed:
			return
		}
	}
}

// watched tells whether any client watches a resource.
func (a *api) watched(resource string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.watches[resource]) > 0
}

// send sends an event to all watchers: "ADDED", "MODIFIED", "DELETED".
func (a *api) send(resource, kind string, o interface {
	runtime.Object
	SetResourceVersion(string)
}) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.version++
	o.SetResourceVersion(strconv.Itoa(a.version))
	frame, err := encodeEvent(kind, o)
	if err != nil {
		return err
	}
	for _, frames := range a.watches[resource] {
		select {
		case frames <- frame:
		default:
			return errors.New("nobody reads what is watched")
		}
	}
	return nil
}
