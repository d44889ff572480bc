package scale

import (
	"context"
	"net"
	"net/http"
	"net/netip"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/sluice-proxy/sluice/test/must"
)

// testLimit bounds each wait.
const testLimit = 20 * time.Second

var testCluster = &cluster{Size: Size{25, 10}, live: netip.MustParseAddr("10.2.0.2"), nodeAddr: netip.MustParseAddr("10.1.0.1")}

// newTestAPI serves the test's cluster.
func newTestAPI(t *testing.T) (*api, context.Context) {
	t.Helper()
	l := must.Get(net.Listen("tcp4", "127.0.0.1:0"))(t)
	a := must.Get(newAPI(l, testCluster))(t)
	t.Cleanup(a.close)
	ctx, cancel := context.WithTimeout(context.Background(), testLimit)
	t.Cleanup(cancel)
	return a, ctx
}

// from lists and watches a resource with Kubernetes' own client, in protobuf like
// the product.
func (a *api) from(t *testing.T, path string, gv schema.GroupVersion, plural string) *cache.ListWatch {
	t.Helper()
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme} {
		must.OK(t, add(scheme))
	}
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	client, err := rest.RESTClientFor(&rest.Config{
		Host: a.url(), APIPath: path, QPS: -1,
		ContentConfig: rest.ContentConfig{
			ContentType: runtime.ContentTypeProtobuf, AcceptContentTypes: runtime.ContentTypeProtobuf,
			GroupVersion: &gv, NegotiatedSerializer: serializer.NewCodecFactory(scheme).WithoutConversion(),
		},
	})
	must.OK(t, err)
	return cache.NewFilteredListWatchFromClient(client, plural, metav1.NamespaceAll, func(*metav1.ListOptions) {})
}

func (a *api) services(t *testing.T) *cache.ListWatch {
	return a.from(t, "/api", corev1.SchemeGroupVersion, "services")
}

func (a *api) endpointSlices(t *testing.T) *cache.ListWatch {
	return a.from(t, "/apis", discoveryv1.SchemeGroupVersion, "endpointslices")
}

// listed returns a list of the kind that the test expects.
func listed[L runtime.Object](ctx context.Context, t *testing.T, from *cache.ListWatch) (l L) {
	t.Helper()
	got := must.Get(from.ListWithContext(ctx, metav1.ListOptions{}))(t)
	l, ok := got.(L)
	if !ok {
		t.Fatalf("a list of type %T", got)
	}
	return l
}

func TestLists(t *testing.T) {
	a, ctx := newTestAPI(t)
	services := listed[*corev1.ServiceList](ctx, t, a.services(t))
	slices := listed[*discoveryv1.EndpointSliceList](ctx, t, a.endpointSlices(t))
	if len(services.Items) != testCluster.Services || services.ResourceVersion != "1" || len(slices.Items) != testCluster.Services {
		t.Fatalf("%d services of version %q, %d slices", len(services.Items), services.ResourceVersion, len(slices.Items))
	}
	endpoints := 0
	for i, s := range slices.Items {
		endpoints += len(s.Endpoints)
		svc := services.Items[i]
		if svc.Spec.ClusterIP != vip(i).String() || s.Labels[discoveryv1.LabelServiceName] != svc.Name {
			t.Errorf("number %d: service %s at %s, its slice is of %s", i, svc.Name, svc.Spec.ClusterIP, s.Labels[discoveryv1.LabelServiceName])
		}
	}
	if endpoints != testCluster.endpoints() {
		t.Errorf("%d endpoints, want %d", endpoints, testCluster.endpoints())
	}
	nodes := listed[*corev1.NodeList](ctx, t, a.from(t, "/api", corev1.SchemeGroupVersion, "nodes"))
	if len(nodes.Items) != 1 || nodes.Items[0].Status.Addresses[0].Address != "10.1.0.1" {
		t.Errorf("nodes %v", nodes)
	}
	cidrs := listed[*networkingv1.ServiceCIDRList](ctx, t, a.from(t, "/apis", networkingv1.SchemeGroupVersion, "servicecidrs"))
	if len(cidrs.Items) != 1 || cidrs.Items[0].Spec.CIDRs[0] != serviceRange.String() {
		t.Errorf("ranges %v", cidrs)
	}
	if _, err := a.from(t, "/api", corev1.SchemeGroupVersion, "pods").ListWithContext(ctx, metav1.ListOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("a list of what there is none of: %v", err)
	}
}

// next gives the next event.
func next(ctx context.Context, t *testing.T, w watch.Interface) watch.Event {
	t.Helper()
	select {
	case e, ok := <-w.ResultChan():
		if !ok {
			t.Fatal("the watch has ended")
		}
		return e
	case <-ctx.Done():
		t.Fatal("no event")
	}
	return watch.Event{}
}

// A streamed list has all objects and then a bookmark that says so; changes follow
// in the same stream.
func TestStreamedList(t *testing.T) {
	a, ctx := newTestAPI(t)
	yes := true
	w, err := a.endpointSlices(t).WatchWithContext(ctx, metav1.ListOptions{
		SendInitialEvents: &yes, AllowWatchBookmarks: true, ResourceVersionMatch: metav1.ResourceVersionMatchNotOlderThan,
	})
	must.OK(t, err)
	defer w.Stop()
	for i := range testCluster.Services {
		e := next(ctx, t, w)
		slice, ok := e.Object.(*discoveryv1.EndpointSlice)
		if e.Type != watch.Added || !ok || slice.Labels[discoveryv1.LabelServiceName] != serviceName(i) {
			t.Fatalf("event %d: %s %T %v", i, e.Type, e.Object, e.Object)
		}
	}
	e := next(ctx, t, w)
	mark, ok := e.Object.(*discoveryv1.EndpointSlice)
	if e.Type != watch.Bookmark || !ok || mark.Annotations[metav1.InitialEventsAnnotationKey] != "true" || mark.ResourceVersion != "1" {
		t.Fatalf("after the list: %s %T %v", e.Type, e.Object, e.Object)
	}
	if !a.watched("endpointslices") || a.watched("services") {
		t.Error("it does not know the watchers")
	}
	other := netip.MustParseAddr("10.2.0.3")
	must.OK(t, a.send("endpointslices", "MODIFIED", testCluster.sliceOf(7, other)))
	e = next(ctx, t, w)
	slice, ok := e.Object.(*discoveryv1.EndpointSlice)
	if e.Type != watch.Modified || !ok || slice.ResourceVersion != "2" || slice.Endpoints[0].Addresses[0] != other.String() {
		t.Errorf("%s %T %v", e.Type, e.Object, e.Object)
	}
}

// A watch without the list has only changes, in order.
func TestWatch(t *testing.T) {
	a, ctx := newTestAPI(t)
	w := must.Get(a.services(t).WatchWithContext(ctx, metav1.ListOptions{ResourceVersion: "1"}))(t)
	defer w.Stop()
	for i, kind := range []string{"ADDED", "MODIFIED", "DELETED"} {
		must.OK(t, a.send("services", kind, testCluster.service(100+i)))
		e := next(ctx, t, w)
		svc, ok := e.Object.(*corev1.Service)
		if string(e.Type) != kind || !ok || svc.Name != serviceName(100+i) || svc.Spec.ClusterIP != vip(100+i).String() {
			t.Errorf("%s: %s %T %v", kind, e.Type, e.Object, e.Object)
		}
	}
}

// The server reports a watcher that does not read, and does not wait for it.
func TestWatcherThatSleeps(t *testing.T) {
	a, _ := newTestAPI(t)
	a.mu.Lock()
	a.watches["services"] = append(a.watches["services"], make(chan []byte, 1))
	a.mu.Unlock()
	must.OK(t, a.send("services", "ADDED", testCluster.service(0)))
	if err := a.send("services", "ADDED", testCluster.service(1)); err == nil {
		t.Error("a queue that is full is no error")
	}
}

func TestRefusesToBeWrittenTo(t *testing.T) {
	a, _ := newTestAPI(t)
	response := must.Get(http.Post(a.url()+"/api/v1/services", "application/json", nil))(t)
	defer response.Body.Close()
	if response.StatusCode != http.StatusNotFound {
		t.Errorf("status %s", response.Status)
	}
}
