package kubernetes

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	eventsv1 "k8s.io/api/events/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// The defaults of a Connection are kube-proxy's.
const (
	defaultContentType = runtime.ContentTypeProtobuf
	defaultQPS         = 5
	defaultBurst       = 10
)

// Timeouts for a network that drops all packets. client-go alone needs 45 s to
// notice (its HTTP/2 pings) and 30 s for each attempt to reconnect. With these it
// takes 20 s, and the connection is back within seconds of the network.
const dialTimeout = 5 * time.Second

var liveness = sys.Liveness{Idle: 10 * time.Second, Interval: 5 * time.Second, Count: 2, UserTimeout: 20 * time.Second}

// dial connects to the API server.
func dial(ctx context.Context, network, address string) (net.Conn, error) {
	d := net.Dialer{Timeout: dialTimeout, KeepAlive: -1, Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			_ = sys.SetLiveness(int(fd), liveness) // without it, the pings remain
		})
	}}
	return d.DialContext(ctx, network, address)
}

// ErrNoCluster is wrapped by Connect's error when nothing names the API server: no
// kubeconfig, no master, and not in a pod.
var ErrNoCluster = errors.New("no API server is known")

// Connection says how to reach the API server. The zero value uses the service
// account of this pod.
type Connection struct {
	// Kubeconfig is a file with address and credentials. Master is an address that
	// overrides that of the file, or of the service account.
	Kubeconfig, Master string
	// ContentType is the media type of requests and responses; empty means
	// Protobuf. AcceptContentTypes overrides it for responses.
	ContentType, AcceptContentTypes string
	// QPS limits the requests a second, after the first Burst ones. 0 means 5 and
	// 10; a negative QPS is no limit, as in client-go. A watch counts when it begins.
	QPS   float32
	Burst int
	// UserAgent says who asks.
	UserAgent string
}

// Client reaches the few parts of the API that a service proxy needs. It is
// safe for concurrent use.
type Client struct {
	core, discovery, networking, events rest.Interface
	metadata                            metadata.Interface
	host                                string
}

// Host returns the API server's address, for logs.
func (c *Client) Host() string { return c.host }

// newScheme contains only the kinds that are read and written: the scheme of the
// whole API links some fifty more groups.
func newScheme() (*runtime.Scheme, error) {
	s := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme, eventsv1.AddToScheme,
	} {
		if err := add(s); err != nil {
			return nil, err
		}
	}
	metav1.AddToGroupVersion(s, schema.GroupVersion{Version: "v1"})
	return s, nil
}

// Connect makes a Client. It reads files, but asks the API server nothing.
func Connect(c Connection) (*Client, error) {
	config, err := c.config()
	if err != nil {
		return nil, err
	}
	registerRequests().expect(config)
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig: %w", err)
	}
	scheme, err := newScheme()
	if err != nil {
		return nil, err
	}
	codecs := serializer.NewCodecFactory(scheme).WithoutConversion()
	out := &Client{host: config.Host}
	for _, group := range []struct {
		client *rest.Interface
		path   string
		gv     schema.GroupVersion
	}{
		{&out.core, "/api", corev1.SchemeGroupVersion},
		{&out.discovery, "/apis", discoveryv1.SchemeGroupVersion},
		{&out.networking, "/apis", networkingv1.SchemeGroupVersion},
		{&out.events, "/apis", eventsv1.SchemeGroupVersion},
	} {
		if *group.client, err = clientFor(config, client, codecs, group.path, group.gv); err != nil {
			return nil, fmt.Errorf("address of the API server (--master, or that of the kubeconfig): %w", err)
		}
	}
	if out.metadata, err = metadata.NewForConfigAndClient(metadata.ConfigFor(config), client); err != nil {
		return nil, err
	}
	return out, nil
}

// config finds the API server as kube-proxy does, except that a Master without a
// Kubeconfig is asked with the credentials of this pod.
func (c Connection) config() (*rest.Config, error) {
	var config *rest.Config
	var err error
	if c.Kubeconfig == "" {
		config, err = c.podConfig(rest.InClusterConfig)
	} else {
		config, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
			&clientcmd.ClientConfigLoadingRules{ExplicitPath: c.Kubeconfig},
			&clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: c.Master}},
		).ClientConfig()
		if err != nil {
			if clientcmd.IsEmptyConfig(err) {
				err = errors.New("it names no cluster: clusters, contexts and current-context are missing, or do not fit together")
			}
			err = fmt.Errorf("kubeconfig %s: %w", c.Kubeconfig, err)
		}
	}
	if err != nil {
		return nil, err
	}
	config.ContentType, config.AcceptContentTypes = cmp.Or(c.ContentType, defaultContentType), c.AcceptContentTypes
	if config.AcceptContentTypes == "" && config.ContentType != runtime.ContentTypeJSON {
		config.AcceptContentTypes = config.ContentType + "," + runtime.ContentTypeJSON
	}
	config.UserAgent, config.Dial = c.UserAgent, dial
	config.Wrap(func(below http.RoundTripper) http.RoundTripper { return attempts{below} })
	if c.QPS < 0 {
		config.RateLimiter = flowcontrol.NewFakeAlwaysRateLimiter()
	} else {
		config.RateLimiter = flowcontrol.NewTokenBucketRateLimiter(cmp.Or(c.QPS, defaultQPS), cmp.Or(c.Burst, defaultBurst))
	}
	return config, nil
}

// podConfig uses the service account of this pod, which inPod reads. The account's
// address of the API server is a cluster IP, which nobody serves yet where this
// program is the only service proxy: Master takes its place. A server without TLS
// gets no token.
func (c Connection) podConfig(inPod func() (*rest.Config, error)) (*rest.Config, error) {
	config, err := inPod()
	switch {
	case errors.Is(err, rest.ErrNotInCluster) && c.Master != "":
		return &rest.Config{Host: c.Master}, nil
	case errors.Is(err, rest.ErrNotInCluster):
		return nil, ErrNoCluster
	case err != nil:
		return nil, fmt.Errorf("service account of this pod: %w", err)
	case c.Master == "":
		return config, nil
	}
	config.Host = c.Master
	if !rest.IsConfigTransportTLS(*config) {
		return &rest.Config{Host: c.Master}, nil
	}
	return config, nil
}

func clientFor(config *rest.Config, client *http.Client, codecs runtime.NegotiatedSerializer, path string, gv schema.GroupVersion) (rest.Interface, error) {
	own := *config
	own.APIPath, own.GroupVersion = path, &gv
	own.NegotiatedSerializer = codecs
	return rest.RESTClientForConfigAndClient(&own, client)
}
