// Package kubernetes follows a Kubernetes API server: Services, EndpointSlices,
// ServiceCIDRs and this node's object become the changes that a service.Store
// takes.
//
//	client, err := kubernetes.Connect(kubernetes.Connection{Kubeconfig: "/etc/kubernetes/proxy.conf"})
//	src := kubernetes.New(client, kubernetes.Options{NodeName: "node-1", Logger: log})
//	err = src.Run(ctx, func(c service.Change) { snapshot = store.Apply(c) })
//
// # What is watched
//
// Services that are not headless, as a proxy with a name only those with its label
// (A1.1, A1.2), EndpointSlices without the headless label (A1.3), the Node of Options.NodeName,
// and ServiceCIDRs. While a Service has the annotation sluice.dev/topology-keys,
// the metadata of all nodes is watched too, as it holds their labels.
//
// Objects are trimmed to the fields that the model reads and given on; no copy
// of them is kept here but for their names and resource versions.
//
// # Order
//
// Nothing is given on before Services and EndpointSlices have both been listed
// (A1.16). The first change holds all of it; node and ServiceCIDRs are in it
// unless the API server does not give them within some seconds. From then on a
// lone change is given on at once. Those that come while the receiver is busy,
// or within Options.MinSyncPeriod of the last, are gathered into one.
//
// # When the API server is gone
//
// Then nothing is given on, so that what is in force stays. Lists and watches
// are tried again, with growing and random pauses up to a few seconds, for as
// long as it takes; what has changed meanwhile is found by a new list. It is
// logged once when it begins and once when it is over, and Stats tells.
//
// # Goroutines
//
// Each kind has a goroutine of its own that reads from the server. Apply is
// called by Run's goroutine, one call at a time. Stats may be called by any.
package kubernetes
