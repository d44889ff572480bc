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
// the metadata of all nodes is watched too, as it holds their labels. With Options.Pods, the pods
// of the node are watched, whose names PodAt returns; they are in no change.
//
// Objects are trimmed to the fields that the model reads and passed on. The
// package keeps only their names and resource versions.
//
// # Order
//
// The first change comes after Services and EndpointSlices have both been listed
// (A1.16), and holds all of them. It also holds the node and the ServiceCIDRs,
// unless the API server takes more than some seconds for these. From then on, a
// single change is passed on at once. Changes that come while the receiver is busy,
// or within Options.MinSyncPeriod of the last, are joined into one.
//
// # When the API server is gone
//
// The configuration in force stays. Lists and watches are retried without end, with
// random, growing pauses of up to some seconds; a new list then shows what has
// changed. The log has one line when the server is lost and one when it is back,
// and Stats has it too.
//
// # Goroutines
//
// Each kind has a goroutine of its own that reads from the server. Apply is
// called by Run's goroutine, one call at a time. Stats may be called by any.
package kubernetes
