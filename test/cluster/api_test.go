//go:build cluster

package cluster

import (
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"

	"github.com/sluice-proxy/sluice/test/must"
)

// api creates, reads and changes objects as one user. The typed clients of
// client-go would need a hundred more packages.
type api struct {
	t       *testing.T
	clients map[schema.GroupVersion]rest.Interface
	scheme  *runtime.Scheme
}

// plurals are the resource names of the kinds that the tests use.
var plurals = map[string]string{
	"Service": "services", "Endpoints": "endpoints", "EndpointSlice": "endpointslices", "Node": "nodes", "Namespace": "namespaces", "Pod": "pods",
	"ClusterRole": "clusterroles", "ClusterRoleBinding": "clusterrolebindings", "ConfigMap": "configmaps",
	"SubjectAccessReview": "subjectaccessreviews",
}

func newAPI(t *testing.T, config *rest.Config) *api {
	t.Helper()
	a := &api{t: t, clients: make(map[schema.GroupVersion]rest.Interface), scheme: runtime.NewScheme()}
	metav1.AddToGroupVersion(a.scheme, schema.GroupVersion{Version: "v1"})
	for _, group := range []struct {
		gv  schema.GroupVersion
		add func(*runtime.Scheme) error
	}{
		{corev1.SchemeGroupVersion, corev1.AddToScheme},
		{discoveryv1.SchemeGroupVersion, discoveryv1.AddToScheme},
		{networkingv1.SchemeGroupVersion, networkingv1.AddToScheme},
		{rbacv1.SchemeGroupVersion, rbacv1.AddToScheme},
		{authorizationv1.SchemeGroupVersion, authorizationv1.AddToScheme},
	} {
		must.OK(t, group.add(a.scheme))
		own := *config
		own.GroupVersion, own.APIPath = &group.gv, "/apis"
		if group.gv.Group == "" {
			own.APIPath = "/api"
		}
		own.NegotiatedSerializer = serializer.NewCodecFactory(a.scheme).WithoutConversion()
		client := must.Get(rest.RESTClientFor(&own))(t)
		a.clients[group.gv] = client
	}
	return a
}

type object interface {
	runtime.Object
	metav1.Object
}

// request starts a request about an object.
func (a *api) request(verb string, o object) *rest.Request {
	gvks, _, err := a.scheme.ObjectKinds(o)
	must.OK(a.t, err)
	r := a.clients[gvks[0].GroupVersion()].Verb(verb).Resource(plurals[gvks[0].Kind])
	if o.GetNamespace() != "" {
		r = r.Namespace(o.GetNamespace())
	}
	if verb != "POST" {
		r = r.Name(o.GetName())
	}
	return r
}

// create creates an object and fills in the API server's version of it.
func (a *api) create(o object) {
	a.t.Helper()
	must.OKf(a.t, a.request("POST", o).Body(o).Do(ctx).Into(o), "creating %s", o.GetName())
}

// update changes an object, or its status.
func (a *api) update(o object, sub ...string) {
	a.t.Helper()
	must.OKf(a.t, a.request("PUT", o).SubResource(sub...).Body(o).Do(ctx).Into(o), "updating %s", o.GetName())
}

// tryUpdate is update for an object that may not exist.
func (a *api) tryUpdate(o object) error { return a.request("PUT", o).Body(o).Do(ctx).Error() }

// read fills in the object of that name.
func (a *api) read(o object) {
	a.t.Helper()
	must.OKf(a.t, a.request("GET", o).Do(ctx).Into(o), "reading %s", o.GetName())
}

// delete removes an object.
func (a *api) delete(o object) {
	a.t.Helper()
	must.OKf(a.t, a.request("DELETE", o).Do(ctx).Error(), "deleting %s", o.GetName())
}

// ready tells whether the API server is ready.
func (a *api) ready() error {
	return a.clients[corev1.SchemeGroupVersion].Get().AbsPath("/readyz").Do(ctx).Error()
}

// deleteServices removes all Services of a namespace, so that the next case can
// use their addresses and ports.
func (a *api) deleteServices(namespace string) {
	a.t.Helper()
	list := &corev1.ServiceList{}
	client := a.clients[corev1.SchemeGroupVersion]
	must.OK(a.t, client.Get().Namespace(namespace).Resource("services").Do(ctx).Into(list))
	for i := range list.Items {
		a.delete(&list.Items[i])
	}
}
