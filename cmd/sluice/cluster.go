package main

import (
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/node"
	"github.com/sluice-proxy/sluice/source/kubernetes"
)

// clusterOptions are the flags that say which API server is followed, and how.
// The names are kube-proxy's.
type clusterOptions struct {
	connection    kubernetes.Connection
	minSyncPeriod time.Duration
	podNames      bool
}

func (o *clusterOptions) register(f *pflag.FlagSet) {
	c := &o.connection
	f.StringVar(&c.Kubeconfig, "kubeconfig", "", "kubeconfig file for the API server; a pod needs none")
	f.StringVar(&c.Master, "master", "", "address of the API server, in place of that of --kubeconfig or of the pod's service account")
	f.StringVar(&c.ContentType, "kube-api-content-type", "application/vnd.kubernetes.protobuf", "media type of requests to the API server")
	f.Float32Var(&c.QPS, "kube-api-qps", 5, "requests a second to the API server, after the first --kube-api-burst ones; negative: no limit")
	f.IntVar(&c.Burst, "kube-api-burst", 10, "requests to the API server that may be made at once")
	f.DurationVar(&o.minSyncPeriod, "min-sync-period", 0, "minimum time between two applied changes from the API server; 0 applies a single change at once")
	f.DurationVar(&o.minSyncPeriod, "iptables-min-sync-period", 0, "another name of --min-sync-period")
	f.BoolVar(&o.podNames, "client-pod-names", false, "know the names of clients that are pods of this node; needs the right to list and watch pods")
	_ = f.MarkHidden("iptables-min-sync-period") // it exists
}

// given reports whether the flags name an API server.
func (o *clusterOptions) given() bool {
	return o.connection.Kubeconfig != "" || o.connection.Master != ""
}

func (o *clusterOptions) validate() error {
	switch c := &o.connection; {
	case math.IsNaN(float64(c.QPS)):
		return fmt.Errorf("--kube-api-qps: %g is not a number", c.QPS)
	case c.Burst < 0:
		return fmt.Errorf("--kube-api-burst: %d is negative", c.Burst)
	case o.minSyncPeriod < 0 || o.minSyncPeriod > time.Hour:
		return fmt.Errorf("--min-sync-period: %s is not between 0 and 1h", o.minSyncPeriod)
	}
	return nil
}

// source says where Services come from.
func (o *runOptions) source() node.Source {
	return node.Source{
		Manifests: o.manifests, MaxManifestSize: o.maxManifestSize, Allocate: o.allocate,
		Cluster: o.cluster.connection, MinSyncPeriod: o.cluster.minSyncPeriod, ClientPodNames: o.cluster.podNames,
	}
}

// errNothingToServe says how to start.
var errNothingToServe = errors.New(`there is nothing to serve. Give one of:
  --manifests DIR     a directory of Kubernetes manifests; no cluster is needed
  --kubeconfig FILE   how to reach the API server of a cluster
  --config FILE       kube-proxy's configuration file
In a pod with a service account none of them is needed. sluice demo shows what it does, without any`)
