package service

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
)

// ObjectKind is a kind of API object that the model is made of.
type ObjectKind uint8

// The kinds that a Store takes.
const (
	KindService ObjectKind = iota + 1
	KindEndpointSlice
	KindNode
	KindServiceCIDR
)

// String returns the kind as the API spells it.
func (k ObjectKind) String() string {
	switch k {
	case KindService:
		return "Service"
	case KindEndpointSlice:
		return "EndpointSlice"
	case KindNode:
		return "Node"
	case KindServiceCIDR:
		return "ServiceCIDR"
	}
	return "unknown"
}

// ObjectKey names an object. Namespace is empty for Nodes and ServiceCIDRs.
type ObjectKey struct {
	Kind ObjectKind
	Name
}

// String returns "Service default/web", "Node a".
func (k ObjectKey) String() string {
	if k.Namespace == "" {
		return k.Kind.String() + " " + k.Name.Name
	}
	return k.Kind.String() + " " + k.Name.String()
}

// Change is what a source has to tell: objects that are new or different, and
// objects that are gone. It takes effect as a whole. The objects belong to the
// receiver's readers from then on; nobody changes them.
type Change struct {
	Services       []*corev1.Service
	EndpointSlices []*discoveryv1.EndpointSlice
	Nodes          []*corev1.Node
	ServiceCIDRs   []*networkingv1.ServiceCIDR
	Deleted        []ObjectKey
	// Host are this node's addresses from now on; nil if they are as before.
	Host *Host

	// Triggers are when the changes of Pods and Services happened that the
	// EndpointSlices tell of, as far as they say so. The Store does not read them.
	Triggers []time.Time
}

// Empty reports whether the change holds nothing.
func (c *Change) Empty() bool {
	return c.Host == nil && len(c.Services)+len(c.EndpointSlices)+len(c.Nodes)+len(c.ServiceCIDRs)+len(c.Deleted) == 0
}
