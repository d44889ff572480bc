package slowpolicy

import (
	"net/netip"

	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
)

// Table converts the cluster into the proxy's decision table. Only this function
// uses the packages that serve.
func (c *Cluster) Table() *policy.Table {
	store := service.NewStore(service.StoreOptions{NodeName: c.NodeName, ServiceProxyName: c.ProxyName})
	snap := store.Apply(service.Change{Services: c.Services, EndpointSlices: c.Slices, Nodes: c.Nodes})
	return policy.Compile(nil, snap, c.Config())
}

// Config is the cluster's part of the configuration of decisions.
func (c *Cluster) Config() policy.Config {
	cfg := policy.Config{
		NodeName: c.NodeName, NodeIPs: c.NodeIPs, NodeAddresses: c.NodeAddresses,
		ClusterCIDRs: c.ClusterCIDRs, ServiceCIDRs: c.ServiceCIDRs,
		MasqueradeAll: c.MasqueradeAll, LocalhostNodePorts: c.LocalhostNodePorts,
	}
	switch c.DetectLocal {
	case "NodeCIDR":
		cfg.DetectLocal = policy.DetectNodeCIDR
	case "Interface":
		cfg.DetectLocal, cfg.PodRanges = policy.DetectInterface, c.PodRanges
	}
	for _, v := range c.NodePortAddresses {
		switch v {
		case "primary":
			cfg.NodePortPrimary = true
		case "localhost":
			cfg.NodePortAddresses = append(cfg.NodePortAddresses, netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("::1/128"))
		case "all":
			cfg.NodePortAddresses = append(cfg.NodePortAddresses, netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0"))
		default:
			cfg.NodePortAddresses = append(cfg.NodePortAddresses, netip.MustParsePrefix(v))
		}
	}
	return cfg
}
