package service

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// ObjectKind is a kind of API object that a Store reads.
type ObjectKind uint8

// The object kinds.
const (
	KindService ObjectKind = iota + 1
	KindEndpointSlice
	KindNode
	KindServiceCIDR
)

// String returns the kind as the API spells it.
func (k ObjectKind) String() string {
	return nameIn(k, []string{KindService: "Service", KindEndpointSlice: "EndpointSlice", KindNode: "Node", KindServiceCIDR: "ServiceCIDR"})
}

// ObjectKey names an object. Namespace is empty for Nodes and ServiceCIDRs.
type ObjectKey struct {
	Kind ObjectKind
	Name
}

// String returns the kind and name, such as "Service default/web" or "Node a".
func (k ObjectKey) String() string {
	if k.Namespace == "" {
		return k.Kind.String() + " " + k.Name.Name
	}
	return k.Kind.String() + " " + k.Name.String()
}

// Change is a batch of new, changed and deleted objects from a source. The Store
// applies it as a whole. It keeps the objects, so nobody may change them
// afterwards.
type Change struct {
	Services       []*corev1.Service
	EndpointSlices []*discoveryv1.EndpointSlice
	Slices         []*Slice // further EndpointSlices
	Nodes          []*corev1.Node
	ServiceCIDRs   []*networkingv1.ServiceCIDR
	Deleted        []ObjectKey
	// Host holds this node's current addresses; nil if they did not change.
	Host *Host

	// Triggers are the times of the Pod and Service changes that caused the
	// EndpointSlice changes, if the slices carry them. The Store ignores them.
	Triggers []time.Time
}

// Put adds an object of a kind that a Store reads, or nil for one that is gone.
func (c *Change) Put(k ObjectKey, object metav1.Object) {
	switch o := object.(type) {
	case nil:
		c.Deleted = append(c.Deleted, k)
	case *corev1.Service:
		c.Services = append(c.Services, o)
	case *discoveryv1.EndpointSlice:
		c.EndpointSlices = append(c.EndpointSlices, o)
	case *Slice:
		c.Slices = append(c.Slices, o)
	case *corev1.Node:
		c.Nodes = append(c.Nodes, o)
	case *networkingv1.ServiceCIDR:
		c.ServiceCIDRs = append(c.ServiceCIDRs, o)
	}
}

// Empty reports whether the change contains nothing.
func (c *Change) Empty() bool {
	return c.Host == nil && len(c.Services)+len(c.EndpointSlices)+len(c.Slices)+len(c.Nodes)+len(c.ServiceCIDRs)+len(c.Deleted) == 0
}
