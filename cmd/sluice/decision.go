package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/manifests"
)

// decisionOptions are the flags that decisions depend on. sluice run and
// sluice explain share them, so that the same flags give the same decisions.
type decisionOptions struct {
	manifests       string
	maxManifestSize int64

	hostname          string
	serviceProxyName  string
	nodeIPs           addresses
	clusterCIDRs      prefixes
	serviceCIDRs      prefixes
	nodePortAddresses []string
	masqueradeAll     bool
	detectLocal       detectLocalMode
}

// register adds the flags. The meaning of --node-ip is what the two commands
// do not have in common.
func (o *decisionOptions) register(f *pflag.FlagSet, nodeIPMeaning string) {
	f.StringVar(&o.manifests, "manifests", "", "directory of Kubernetes manifests (*.yaml, *.yml, *.json, also in folders below)")
	f.Int64Var(&o.maxManifestSize, "max-manifest-size", manifests.DefaultMaxFileSize, "largest manifest file that is read, in bytes")
	f.StringVar(&o.hostname, "hostname-override", "", "name of this node (default: the host's name in lower case)")
	f.StringVar(&o.serviceProxyName, "service-proxy-name", "", "serve only Services whose label "+proxyNameLabel+" has this value (default: those without the label)")
	f.Var(&o.nodeIPs, "node-ip", nodeIPMeaning)
	f.Var(&o.serviceCIDRs, "service-cidr", "ranges of cluster IPs, beside those of ServiceCIDR objects; without any, each cluster IP is steered by itself")
	f.Var(&o.clusterCIDRs, "cluster-cidr", "ranges of pod addresses; clients in them count as pods")
	f.Var(&o.detectLocal, "detect-local-mode", "how clients that are pods are told from others: by --cluster-cidr, or by the podCIDRs of this node's object (default: ClusterCIDR)")
	f.StringSliceVar(&o.nodePortAddresses, "nodeport-addresses", nil, "node addresses that have node ports: CIDRs, or primary, or localhost, or all (default: all)")
	f.BoolVar(&o.masqueradeAll, "masquerade-all", false, "never show endpoints a client's address on cluster IPs")
}

// validate completes the flags and tells what is wrong with them.
func (o *decisionOptions) validate() error {
	if info, err := os.Stat(o.manifests); err != nil {
		return fmt.Errorf("--manifests: %w", err)
	} else if !info.IsDir() {
		return fmt.Errorf("--manifests: %s is not a directory; put the file into one", o.manifests)
	}
	if o.maxManifestSize < 1 || o.maxManifestSize > 1<<30 {
		return fmt.Errorf("--max-manifest-size: %d is not between 1 and %d", o.maxManifestSize, 1<<30)
	}
	if o.hostname == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("this node's name: %w; give --hostname-override", err)
		}
		o.hostname = name
	}
	o.hostname = strings.ToLower(strings.TrimSpace(o.hostname))
	if wrong := validation.IsValidLabelValue(o.serviceProxyName); len(wrong) > 0 {
		return fmt.Errorf("--service-proxy-name: %q cannot be the value of a label: %s", o.serviceProxyName, wrong[0])
	}
	return validNodePortAddresses(o.nodePortAddresses)
}

// proxyNameLabel gives a Service to a proxy by its name (A1.1, A1.2).
const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// store says whose services are taken in.
func (o *decisionOptions) store() service.StoreOptions {
	return service.StoreOptions{NodeName: o.hostname, ServiceProxyName: o.serviceProxyName}
}

// config gives what decisions depend on beside the manifests. local are the
// addresses of this node's interfaces, as far as they are known.
func (o *decisionOptions) config(local []netip.Addr) policy.Config {
	c := policy.Config{
		NodeName:           o.hostname,
		DetectLocal:        o.detectLocal.value,
		ClusterCIDRs:       o.clusterCIDRs,
		ServiceCIDRs:       o.serviceCIDRs,
		MasqueradeAll:      o.masqueradeAll,
		NodeAddresses:      local,
		NodeIPs:            o.nodeIPs,
		LocalhostNodePorts: true,
	}
	for _, v := range o.nodePortAddresses {
		switch v {
		case "primary":
			c.NodePortPrimary = true
		case "localhost":
			c.NodePortAddresses = append(c.NodePortAddresses, netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"))
		case "all":
			c.NodePortAddresses = append(c.NodePortAddresses, netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0"))
		default:
			c.NodePortAddresses = append(c.NodePortAddresses, netip.MustParsePrefix(v))
		}
	}
	return c
}

// validNodePortAddresses checks what --nodeport-addresses may hold: CIDRs and
// the words primary, localhost and all, no word twice (A4.1).
func validNodePortAddresses(values []string) error {
	seen := make(map[string]bool)
	for _, v := range values {
		switch v {
		case "primary", "localhost", "all":
			if seen[v] {
				return fmt.Errorf("--nodeport-addresses: %s is given twice", v)
			}
			seen[v] = true
		default:
			if _, err := parsePrefix(v); err != nil {
				return fmt.Errorf("--nodeport-addresses: %w; the words primary, localhost and all are possible too", err)
			}
		}
	}
	return nil
}

// noInterfaceModes says why two of kube-proxy's modes are missing: a proxy in
// user space sees a client's address, not the interface that its packets came
// in by (A4.6).
const noInterfaceModes = "telling pods by the interface that they come in by is not available in this version; use --detect-local-mode ClusterCIDR or NodeCIDR"

// detectLocalMode is the flag --detect-local-mode (A4.6).
type detectLocalMode struct{ value policy.DetectLocal }

func (m *detectLocalMode) Type() string { return "ClusterCIDR|NodeCIDR" }

func (m *detectLocalMode) String() string {
	if m.value == policy.DetectNodeCIDR {
		return "NodeCIDR"
	}
	return ""
}

func (m *detectLocalMode) Set(s string) error {
	switch s {
	case "ClusterCIDR":
		m.value = policy.DetectClusterCIDR
	case "NodeCIDR":
		m.value = policy.DetectNodeCIDR
	case "BridgeInterface", "InterfaceNamePrefix":
		return errors.New(noInterfaceModes)
	default:
		return fmt.Errorf("%q is not one of ClusterCIDR, NodeCIDR", s)
	}
	return nil
}
