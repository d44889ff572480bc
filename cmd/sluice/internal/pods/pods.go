// Package pods reaches the proxies of a whole cluster: it finds the pods of Sluice, and
// connects to the admin socket in each by an exec of the API server. It has the rights of
// the user's kubeconfig: list pods, and get and create pods/exec, in one namespace.
package pods

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Place says which cluster is asked, and which pods in it are Sluice's.
type Place struct {
	// Kubeconfig is a file; if it is empty, $KUBECONFIG and ~/.kube/config are read, as
	// kubectl does. Context is one of its contexts; empty means the current one.
	Kubeconfig, Context string
	Namespace, Selector string
}

// Cluster reaches the pods of a Place. It is safe for concurrent use.
type Cluster struct {
	place  Place
	config *rest.Config
	core   *rest.RESTClient
}

// Pod is the proxy of one node.
type Pod struct {
	Node, Name string
	// Trouble is why it cannot be asked, or nil.
	Trouble error

	container string
	ready     bool
	created   metav1.Time
}

// Connect reads the kubeconfig. It asks the API server nothing.
func Connect(p Place) (*Cluster, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = p.Kubeconfig
	config, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: p.Context}).ClientConfig()
	if clientcmd.IsEmptyConfig(err) {
		return nil, errors.New("no cluster is known: there is no ~/.kube/config; set KUBECONFIG or give --kubeconfig")
	}
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	scheme := runtime.NewScheme()
	if err := corev1.AddToScheme(scheme); err != nil {
		return nil, err
	}
	config.APIPath, config.GroupVersion = "/api", &schema.GroupVersion{Version: "v1"}
	config.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	config.QPS = -1 // an exec of each pod, once
	core, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	return &Cluster{place: p, config: config, core: core}, nil
}

// List returns the proxies of all nodes, or of those that are named, sorted by node: one
// of each node. A named node without a pod has one in trouble.
func (c *Cluster) List(ctx context.Context, nodes []string) ([]Pod, error) {
	list := &corev1.PodList{}
	err := c.core.Get().Namespace(c.place.Namespace).Resource("pods").Param("labelSelector", c.place.Selector).Do(ctx).Into(list)
	if err != nil {
		return nil, fmt.Errorf("pods in namespace %s: %w", c.place.Namespace, err)
	}
	if len(list.Items) == 0 {
		return nil, fmt.Errorf("no pod in namespace %s has the label %s: see --namespace and --selector", c.place.Namespace, c.place.Selector)
	}
	return choose(list.Items, nodes), nil
}

// choose returns one pod for each node: a running one if there is one, the ready or else
// the newer one of two, as during a rolling update.
func choose(all []corev1.Pod, nodes []string) []Pod {
	best := make(map[string]Pod)
	for i := range all {
		p := podOf(&all[i])
		if now, ok := best[p.Node]; !ok || compare(p, now) < 0 {
			best[p.Node] = p
		}
	}
	var out []Pod
	for node, p := range best {
		if len(nodes) == 0 || slices.Contains(nodes, node) {
			out = append(out, p)
		}
	}
	for _, node := range nodes {
		if _, ok := best[node]; !ok {
			out = append(out, Pod{Node: node, Trouble: errors.New("it has no pod of Sluice")})
		}
	}
	slices.SortFunc(out, func(a, b Pod) int { return strings.Compare(a.Node, b.Node) })
	return slices.CompactFunc(out, func(a, b Pod) bool { return a.Node == b.Node })
}

// compare sorts the pod to ask first.
func compare(a, b Pod) int {
	first := func(yes bool) int {
		if yes {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(first(a.Trouble == nil), first(b.Trouble == nil)),
		cmp.Compare(first(a.ready), first(b.ready)),
		b.created.Compare(a.created.Time),
		strings.Compare(a.Name, b.Name),
	)
}

func podOf(p *corev1.Pod) Pod {
	out := Pod{Node: p.Spec.NodeName, Name: p.Name, created: p.CreationTimestamp}
	if out.Node == "" {
		out.Node = "(none)"
	}
	for _, c := range p.Spec.Containers {
		if out.container == "" || c.Name == "sluice" {
			out.container = c.Name
		}
	}
	for _, c := range p.Status.Conditions {
		out.ready = out.ready || c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	}
	if p.Status.Phase != corev1.PodRunning {
		out.Trouble = fmt.Errorf("its pod %s is %s", p.Name, cmp.Or(p.Status.Phase, "unknown"))
	}
	return out
}
