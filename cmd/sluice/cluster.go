package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/rs/zerolog"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/source/manifests"
)

// clusterOptions are the flags that say which API server is followed, and how.
// The names are kube-proxy's.
type clusterOptions struct {
	connection    kubernetes.Connection
	minSyncPeriod time.Duration
}

func (o *clusterOptions) register(f *pflag.FlagSet) {
	c := &o.connection
	f.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig file for the API server; in a pod the service account is enough")
	f.StringVar(&c.Master, "master", "", "address of the API server, instead of that of --kubeconfig")
	f.StringVar(&c.ContentType, "kube-api-content-type", "application/vnd.kubernetes.protobuf", "media type of requests to the API server")
	f.Float32Var(&c.QPS, "kube-api-qps", 5, "requests a second to the API server, after the first --kube-api-burst ones")
	f.IntVar(&c.Burst, "kube-api-burst", 10, "requests to the API server that may be made at once")
	f.DurationVar(&o.minSyncPeriod, "min-sync-period", 0, "minimum time between two applied changes; 0 applies a single change at once")
	f.DurationVar(&o.minSyncPeriod, "iptables-min-sync-period", 0, "another name of --min-sync-period")
	_ = f.MarkHidden("iptables-min-sync-period") // it exists
}

// given reports whether the flags name an API server.
func (o *clusterOptions) given() bool {
	return o.connection.Kubeconfig != "" || o.connection.Master != ""
}

func (o *clusterOptions) validate() error {
	switch c := &o.connection; {
	case c.QPS < 0:
		return fmt.Errorf("--kube-api-qps: %g is negative", c.QPS)
	case c.Burst < 0:
		return fmt.Errorf("--kube-api-burst: %d is negative", c.Burst)
	case o.minSyncPeriod < 0 || o.minSyncPeriod > time.Hour:
		return fmt.Errorf("--min-sync-period: %s is not between 0 and 1h", o.minSyncPeriod)
	}
	return nil
}

// errNothingToServe says how to start.
var errNothingToServe = errors.New(`there is nothing to serve. Give one of:
  --manifests DIR     a directory of Kubernetes manifests; no cluster is needed
  --kubeconfig FILE   how to reach the API server of a cluster
  --config FILE       kube-proxy's configuration file
In a pod with a service account none of them is needed. sluice demo shows what it does, without any`)

// openSource opens the source of Services: a directory or a cluster.
func (p *proxy) openSource() error {
	o := p.options
	if o.manifests != "" {
		p.manifests = o.openManifests(p.log)
		p.source = p.manifests
		return nil
	}
	client, err := o.connect(p.log)
	if errors.Is(err, kubernetes.ErrNoCluster) {
		return errNothingToServe
	}
	if err != nil {
		return err
	}
	p.cluster = o.openCluster(client, p.log)
	p.source = p.cluster
	p.events = kubernetes.NewEvents(client, o.hostname, p.log)
	p.log.Info().Str("server", client.Host()).Str("node", o.hostname).Msg("following the API server")
	return nil
}

func (o *decisionOptions) openManifests(log zerolog.Logger) *manifests.Watcher {
	return manifests.New(o.manifests, manifests.Options{Logger: log, MaxFileSize: o.maxManifestSize})
}

// connect prepares to reach the API server.
func (o *runOptions) connect(log zerolog.Logger) (*kubernetes.Client, error) {
	quietKlog(log)
	connection := o.cluster.connection
	connection.UserAgent = "sluice/" + version
	return kubernetes.Connect(connection)
}

// openCluster opens the source of Services in a cluster.
func (o *runOptions) openCluster(client *kubernetes.Client, log zerolog.Logger) *kubernetes.Source {
	return kubernetes.New(client, kubernetes.Options{
		NodeName:         o.hostname,
		ServiceProxyName: o.serviceProxyName,
		MinSyncPeriod:    o.cluster.minSyncPeriod,
		Logger:           log,
	})
}
