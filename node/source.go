package node

import (
	"cmp"
	"context"
	"net/netip"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/datagram"
	"github.com/sluice-proxy/sluice/flow"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/kubernetes"
	"github.com/sluice-proxy/sluice/source/manifests"
	"github.com/sluice-proxy/sluice/stream"
)

// Source says where Services come from: a directory of manifests, or an API server.
type Source struct {
	Manifests       string         // the directory; empty: the API server
	MaxManifestSize int64          // in bytes
	Allocate        []netip.Prefix // ranges of cluster IPs for manifests without one
	Cluster         kubernetes.Connection
	MinSyncPeriod   time.Duration // between two changes of the API server; 0: none
	ClientPodNames  bool          // know the pods of this node from the API server
}

// Objects passes on everything first, then each change, until ctx ends.
type Objects interface {
	Run(ctx context.Context, apply func(service.Change)) error
}

// openSource opens the source of Services.
func (p *Proxy) openSource() error {
	o := &p.config
	objects, client, err := o.OpenSource(p.log)
	if err != nil {
		return err
	}
	p.source = objects
	p.manifests, _ = objects.(*manifests.Watcher)
	p.cluster, _ = objects.(*kubernetes.Source)
	if client != nil {
		p.events = kubernetes.NewEvents(client, o.Policy.NodeName, p.log)
		p.log.Info().Str("server", client.Host()).Str("node", o.Policy.NodeName).Msg("following the API server")
	}
	return nil
}

// OpenSource opens the source of Services: a directory, or a cluster, to whose API
// server it also returns a client.
func (o *Config) OpenSource(log zerolog.Logger) (Objects, *kubernetes.Client, error) {
	if o.Source.Manifests != "" {
		return manifests.New(o.Source.Manifests, o.Manifests(log)), nil, nil
	}
	quietKlog(log)
	connection := o.Source.Cluster
	connection.UserAgent = "sluice/" + o.Version
	client, err := kubernetes.Connect(connection)
	if err != nil {
		return nil, nil, err
	}
	return kubernetes.New(client, kubernetes.Options{
		NodeName:         o.Policy.NodeName,
		ServiceProxyName: o.Store.ServiceProxyName,
		MinSyncPeriod:    o.Source.MinSyncPeriod,
		Names:            len(o.DNS.Addresses) > 0,
		Pods:             o.Source.ClientPodNames,
		Logger:           log,
	}), client, nil
}

// Manifests returns the options of a directory of manifests.
func (o *Config) Manifests(log zerolog.Logger) manifests.Options {
	return manifests.Options{
		Logger:      log,
		MaxFileSize: o.Source.MaxManifestSize,
		Allocate:    o.Source.Allocate,
		Annotation:  checkAnnotation,
	}
}

// checkAnnotation returns what is wrong with the value of an annotation of a Service, whose name
// is without the prefix sluice.dev/, apart from those that package service reads.
func checkAnnotation(name, value string) error {
	return cmp.Or(
		balancer.CheckAnnotation(name, value),
		datagram.CheckAnnotation(name, value),
		conntrack.CheckAnnotation(name, value),
		stream.CheckAnnotation(name, value),
		flow.CheckAnnotation(name, value),
	)
}
