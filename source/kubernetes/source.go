package kubernetes

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"github.com/sluice-proxy/sluice/service"
)

const (
	// nodePatience is how long the first change waits for this node's object and the
	// ServiceCIDRs after everything else has come.
	nodePatience = 5 * time.Second
	// calm bounds how long a change waits because the last one kept the receiver
	// busy.
	calm = 100 * time.Millisecond
)

// Options are the choices of a Source.
type Options struct {
	// NodeName is this node, whose object is watched.
	NodeName string
	// ServiceProxyName is the value of the label service-proxy-name of the
	// Services that are ours (A1.2); "" stands for those without it (A1.1).
	ServiceProxyName string
	// MinSyncPeriod is the least time between two changes. With 0, a single change
	// is passed on at once.
	MinSyncPeriod time.Duration
	// Names adds headless Services and their slices, which proxies ignore (A1.3, A1.4) and
	// a DNS server needs.
	Names bool
	// Pods has PodAt know the pods of NodeName.
	Pods bool
	// Logger receives lines about the API server.
	Logger zerolog.Logger
}

// Stats describes a Source at one moment.
type Stats struct {
	// Connected is set while the API server answers all our requests.
	Connected bool `metric:"sluice_kubernetes_connected" help:"1 while the API server answers all requests, 0 otherwise."`
	// Errors counts failed requests. Relists counts how often all objects of a
	// kind were listed again because a watch could not continue where it was.
	Errors  uint64 `metric:"sluice_kubernetes_errors_total" help:"Requests to the API server that failed."`
	Relists uint64 `metric:"sluice_kubernetes_relists_total" help:"Times that all objects of a kind were listed again, because their watch could not be resumed."`
	// ServiceChanges and EndpointChanges count the objects that were new, changed
	// or deleted; the pending ones have not been passed on yet.
	ServiceChanges         uint64 `metric:"kubeproxy_sync_proxy_rules_service_changes_total" help:"Services that were added, changed or removed."`
	PendingServiceChanges  int    `metric:"kubeproxy_sync_proxy_rules_service_changes_pending" help:"Services among them that are not in force yet."`
	EndpointChanges        uint64 `metric:"kubeproxy_sync_proxy_rules_endpoint_changes_total" help:"EndpointSlices that were added, changed or removed."`
	PendingEndpointChanges int    `metric:"kubeproxy_sync_proxy_rules_endpoint_changes_pending" help:"EndpointSlices among them that are not in force yet."`
}

// Source follows an API server. Its Run may be called once; Stats may be called
// at any time by any goroutine.
type Source struct {
	client  *Client
	options Options
	log     zerolog.Logger
	feed    *feed
	link    *link

	topology *topology
	pods     pods
	watchers []*watcher
	// required kinds must be listed before the first change (A1.16); wanted kinds
	// may delay it for nodePatience.
	required, wanted []<-chan struct{}
	nodePatience     time.Duration

	minSyncPeriod                atomic.Int64 // see Options
	synced                       atomic.Bool
	serviceChanges, sliceChanges atomic.Uint64
	started                      time.Time
}

// New creates a Source. It makes no request yet.
func New(client *Client, options Options) *Source {
	s := &Source{client: client, options: options, log: options.Logger, feed: newFeed(), nodePatience: nodePatience}
	s.SetMinSyncPeriod(options.MinSyncPeriod)
	s.link = newLink(options.Logger, client.host)
	s.topology = newTopology(s)
	s.required = []<-chan struct{}{s.addServices(), s.addSlices()}
	s.wanted = []<-chan struct{}{s.addServiceCIDRs()}
	if options.NodeName != "" {
		s.wanted = append(s.wanted, s.addNode())
	}
	if options.Pods {
		s.addPods()
	}
	return s
}

func (s *Source) addServices() <-chan struct{} {
	w := &watcher{kind: "services", object: &corev1.Service{}, from: resource(s.client.core, "services"), settled: make(chan struct{})}
	// As the default proxy we leave the cluster IPs of other proxies' Services
	// alone (A1.1), and have to know them: they lie in our ranges.
	if !s.options.Names {
		w.selector = selector{fields: "spec.clusterIP!=None"}
	}
	proxyName := s.options.ServiceProxyName
	if proxyName != "" {
		w.selector.labels = proxyNameLabel + "=" + proxyName // A1.2
	}
	w.into = newBox(trimmed(trimService), func(name service.Name, svc *corev1.Service) {
		s.serviceChanges.Add(1)
		if svc != nil && svc.Labels[proxyNameLabel] != proxyName {
			s.topology.note(name, nil)
		} else {
			s.topology.note(name, svc)
		}
		put(s.feed, service.KindService, name, svc)
	}, s.listed(w))
	return s.add(w)
}

func (s *Source) addSlices() <-chan struct{} {
	w := &watcher{kind: "endpointslices", object: &discoveryv1.EndpointSlice{}, from: resource(s.client.discovery, "endpointslices"), settled: make(chan struct{})}
	if s.options.Names {
		w.into = sliceBox(s, trimmed(trimSlice), s.listed(w))
	} else {
		w.selector.labels = "!" + corev1.IsHeadlessService // A1.3
		w.into = sliceBox(s, s.parseSlice, s.listed(w))
	}
	return s.add(w)
}

// parseSlice parses a slice, unless it has done so already. At the start, all slices of the
// cluster are in memory at once, parsed or not.
func (s *Source) parseSlice(object any) (*service.Slice, bool) {
	if es, ok := object.(*discoveryv1.EndpointSlice); ok {
		trimSlice(es)
		return service.ParseSlice(es, s.options.NodeName), true
	}
	parsed, ok := object.(*service.Slice)
	return parsed, ok
}

func sliceBox[T any, P interface {
	*T
	metav1.Object
}](s *Source, read func(any) (P, bool), listed func(int)) *box[T, P] {
	triggers := newTriggers()
	return newBox(read, func(name service.Name, slice P) {
		s.sliceChanges.Add(1)
		text := ""
		if slice != nil {
			text = slice.GetAnnotations()[corev1.EndpointsLastChangeTriggerTime]
		}
		var since []time.Time
		if at, ok := triggers.next(name, text); ok && at.After(s.started) {
			since = append(since, at)
		}
		put(s.feed, service.KindEndpointSlice, name, slice, since...)
	}, listed)
}

func (s *Source) addNode() <-chan struct{} {
	w := &watcher{kind: "nodes", optional: true, object: &corev1.Node{}, from: resource(s.client.core, "nodes"), settled: make(chan struct{})}
	w.selector.fields = fields.OneTermEqualSelector("metadata.name", s.options.NodeName).String()
	w.into = newBox(trimmed(trimNode), func(name service.Name, node *corev1.Node) {
		put(s.feed, service.KindNode, name, node)
	}, s.listed(w))
	return s.add(w)
}

func (s *Source) addServiceCIDRs() <-chan struct{} {
	w := &watcher{kind: "servicecidrs", optional: true, object: &networkingv1.ServiceCIDR{}, from: resource(s.client.networking, "servicecidrs"), settled: make(chan struct{})}
	w.into = newBox(trimmed(trimServiceCIDR), func(name service.Name, cidr *networkingv1.ServiceCIDR) {
		put(s.feed, service.KindServiceCIDR, name, cidr)
	}, s.listed(w))
	return s.add(w)
}

func (s *Source) add(w *watcher) <-chan struct{} {
	s.watchers = append(s.watchers, w)
	return w.settled
}

// listed returns the callback for when a kind was listed.
func (s *Source) listed(w *watcher) func(changed int) {
	return func(changed int) {
		s.link.listed(w.kind, changed)
		w.settle()
	}
}

// SetMinSyncPeriod changes Options.MinSyncPeriod. It may be called at any time by any
// goroutine.
func (s *Source) SetMinSyncPeriod(d time.Duration) { s.minSyncPeriod.Store(int64(d)) }

// Run watches and calls apply, first with everything, then with each change. It
// returns nil when ctx ends, and retries whatever the API server does.
func (s *Source) Run(ctx context.Context, apply func(service.Change)) error {
	// A watcher between two attempts notices the end of ctx only after its pause.
	// Nothing waits for these goroutines, as they have nothing to clean up.
	s.started = time.Now()
	for _, w := range s.watchers {
		go w.run(ctx, s.link)
	}
	go s.topology.run(ctx)
	if !s.await(ctx) {
		return nil
	}
	for {
		change := s.feed.take()
		if !s.synced.Load() || !change.Empty() {
			begin := time.Now()
			apply(change)
			s.synced.Store(true)
			if !s.rest(ctx, begin) {
				return nil
			}
		}
		select {
		case <-s.feed.wake:
		case <-ctx.Done():
			return nil
		}
	}
}

// await waits for everything that the first change must hold, and reports whether
// it has come.
func (s *Source) await(ctx context.Context) bool {
	for _, ready := range s.required {
		select {
		case <-ready:
		case <-ctx.Done():
			return false
		}
	}
	patience := time.After(s.nodePatience)
	wanted := s.wanted
	if s.topology.needed.Load() {
		wanted = append(slices.Clip(wanted), s.topology.nodes.watcher.settled)
	}
	for _, ready := range wanted {
		select {
		case <-ready:
		case <-patience:
			s.log.Warn().Msg("the API server is slow to give Nodes and ServiceCIDRs; going on without")
			return true
		case <-ctx.Done():
			return false
		}
	}
	return true
}

// rest waits until the minimum period has passed since begin. Without one, it waits
// as long as the receiver took, so that many changes take half of its time at most.
func (s *Source) rest(ctx context.Context, begin time.Time) bool {
	took := time.Since(begin)
	wait := max(time.Duration(s.minSyncPeriod.Load())-took, min(took, calm))
	select {
	case <-time.After(wait):
		return true
	case <-ctx.Done():
		return false
	}
}

// Stats returns the current state. Safe for concurrent use.
func (s *Source) Stats() Stats {
	stats := s.link.stats()
	stats.ServiceChanges, stats.EndpointChanges = s.serviceChanges.Load(), s.sliceChanges.Load()
	stats.PendingServiceChanges, stats.PendingEndpointChanges = s.feed.waiting(service.KindService), s.feed.waiting(service.KindEndpointSlice)
	return stats
}
