package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/sluice-proxy/sluice/host/hostnet"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/source/manifests"
)

// decisionOptions are the flags that decisions depend on, shared by sluice run and
// sluice explain.
type decisionOptions struct {
	manifests       string
	maxManifestSize int64

	hostname          string
	serviceProxyName  string
	nodeIPs           addresses
	clusterCIDRs      latePrefixes
	serviceCIDRs      prefixes
	allocate          prefixes
	nodePortAddresses []string
	masqueradeAll     bool
	externalIPs       externalIPs
	// noLocalhostNodePorts keeps node ports off 127.0.0.0/8 unless they are asked
	// for there (A4.5).
	noLocalhostNodePorts bool
	detectLocal          lateChoice
	podBridge            string
	podPrefix            string
}

func (o *decisionOptions) register(f *pflag.FlagSet) {
	f.StringVar(&o.manifests, "manifests", "", "directory of Kubernetes manifests (*.yaml, *.yml and *.json, also in subdirectories)")
	f.Int64Var(&o.maxManifestSize, "max-manifest-size", manifests.DefaultMaxFileSize, "largest manifest file that is read, in bytes")
	f.StringVar(&o.hostname, "hostname-override", "", "name of this node (default: the host's name in lower case)")
	f.StringVar(&o.serviceProxyName, "service-proxy-name", "", "serve only Services whose label "+proxyNameLabel+" has this value (default: those without the label)")
	f.Var(&o.nodeIPs, "node-ip", "this node's own addresses, at most one of each family: the source of its own connections to Services (default: the InternalIP of the Node object, else the default route's source)")
	f.Var(&o.serviceCIDRs, "service-cidr", "ranges of cluster IPs, beside those of ServiceCIDR objects; without, and with --service-proxy-name, each cluster IP is steered on its own")
	f.Var(&o.allocate, "allocate-cluster-ips", "with --manifests: ranges of which Services without a cluster IP get one, at most one of each family")
	f.Var(&o.clusterCIDRs, "cluster-cidr", "ranges of pod addresses: clients in them count as pods")
	o.detectLocal.value, o.detectLocal.byDefault = detectClusterCIDR, detectClusterCIDR
	o.detectLocal.allowed = []string{detectClusterCIDR, detectNodeCIDR, detectBridge, detectPrefix}
	f.Var(&o.detectLocal, "detect-local-mode", "how Sluice recognises pods of this node: by --cluster-cidr, by the podCIDRs of this node's object, or by the interface to which their addresses are routed")
	f.StringVar(&o.podBridge, "pod-bridge-interface", "", "the interface of pods, for --detect-local-mode BridgeInterface")
	f.StringVar(&o.podPrefix, "pod-interface-name-prefix", "", "prefix of the names of pods' interfaces, for --detect-local-mode InterfaceNamePrefix")
	f.StringSliceVar(&o.nodePortAddresses, "nodeport-addresses", nil, "node addresses that have node ports: CIDRs, primary, localhost or all (default: all)")
	f.Var(&o.externalIPs, "external-ips", "which external IPs of Services are served: all, none, or those in CIDRs; whoever may write a Service may write any")
	f.BoolVar(&o.masqueradeAll, "masquerade-all", false, "never show endpoints a client's address on cluster IPs")
}

// validate completes and checks the flags.
func (o *decisionOptions) validate() error {
	if o.manifests != "" {
		if info, err := os.Stat(o.manifests); err != nil {
			return fmt.Errorf("--manifests: %w", err)
		} else if !info.IsDir() {
			return fmt.Errorf("--manifests: %s is not a directory; put the file into one", o.manifests)
		}
	}
	if err := o.validAllocate(); err != nil {
		return err
	}
	if err := between("max-manifest-size", o.maxManifestSize, 1, 1<<30); err != nil {
		return err
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
	if o.clusterCIDRs.wrong != nil {
		return fmt.Errorf("--cluster-cidr: %w", o.clusterCIDRs.wrong)
	}
	if err := o.validDetectLocal(); err != nil {
		return err
	}
	return validNodePortAddresses(o.nodePortAddresses)
}

// validAllocate checks --allocate-cluster-ips.
func (o *decisionOptions) validAllocate() error {
	for i, r := range o.allocate {
		if err := service.CheckRange(r); err != nil {
			return fmt.Errorf("--allocate-cluster-ips: %s: %w", r, err)
		}
		if i > 1 || i == 1 && r.Addr().Is6() == o.allocate[0].Addr().Is6() {
			return errors.New("--allocate-cluster-ips: give one range of each family at most")
		}
	}
	if len(o.allocate) > 0 && o.manifests == "" {
		return errors.New("--allocate-cluster-ips belongs to --manifests: in a cluster, the API server gives addresses")
	}
	return nil
}

// The values of --detect-local-mode (A4.6).
const (
	detectClusterCIDR = "ClusterCIDR"
	detectNodeCIDR    = "NodeCIDR"
	detectBridge      = "BridgeInterface"
	detectPrefix      = "InterfaceNamePrefix"
)

// validDetectLocal checks that --detect-local-mode and the flags of pods' interfaces
// fit together (A4.6).
func (o *decisionOptions) validDetectLocal() error {
	if err := o.detectLocal.check(); err != nil {
		return fmt.Errorf("--detect-local-mode: %w", err)
	}
	for _, f := range []struct{ mode, flag, value string }{
		{detectBridge, "--pod-bridge-interface", o.podBridge},
		{detectPrefix, "--pod-interface-name-prefix", o.podPrefix},
	} {
		switch used := o.detectLocal.value == f.mode; {
		case used && f.value == "":
			return fmt.Errorf("--detect-local-mode %s needs %s", f.mode, f.flag)
		case !used && f.value != "":
			return fmt.Errorf("%s %s counts only with --detect-local-mode %s", f.flag, f.value, f.mode)
		case len(f.value) > maxInterfaceName:
			return fmt.Errorf("%s: %q is longer than the name of an interface can be, %d bytes", f.flag, f.value, maxInterfaceName)
		}
	}
	return nil
}

// maxInterfaceName is the kernel's IFNAMSIZ without the zero at the end.
const maxInterfaceName = 15

// podInterfaces returns a predicate for the names of pods' interfaces; nil if the
// mode does not use interfaces.
func (o *decisionOptions) podInterfaces() func(name string) bool {
	switch o.detectLocal.value {
	case detectBridge:
		return hostnet.Named(o.podBridge)
	case detectPrefix:
		return hostnet.Prefixed(o.podPrefix)
	}
	return nil
}

// proxyNameLabel assigns a Service to a proxy by name (A1.1, A1.2).
const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// store returns the options of the Store.
func (o *decisionOptions) store() service.StoreOptions {
	return service.StoreOptions{
		NodeName: o.hostname, ServiceProxyName: o.serviceProxyName, ExternalIPs: o.externalIPs.ExternalIPs,
		EarlierFirst: o.manifests != "", OwnEndpoints: o.manifests != "",
	}
}

// serviceRanges returns the ranges of cluster IPs that are ours as a whole. As a
// proxy beside another one we have the cluster IPs of our own Services alone.
func (o *decisionOptions) serviceRanges() []netip.Prefix {
	if o.serviceProxyName != "" {
		return nil
	}
	return slices.Concat(o.serviceCIDRs, o.allocate)
}

// policy returns the policy's configuration, without what the node's network stack adds.
func (o *decisionOptions) policy() policy.Config {
	c := policy.Config{
		NodeName:           o.hostname,
		ClusterCIDRs:       o.clusterCIDRs.prefixes,
		ServiceCIDRs:       o.serviceRanges(),
		MasqueradeAll:      o.masqueradeAll,
		NodeIPs:            o.nodeIPs,
		LocalhostNodePorts: !o.noLocalhostNodePorts,
	}
	switch o.detectLocal.value {
	case detectNodeCIDR:
		c.DetectLocal = policy.DetectNodeCIDR
	case detectBridge, detectPrefix:
		c.DetectLocal = policy.DetectInterface
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
