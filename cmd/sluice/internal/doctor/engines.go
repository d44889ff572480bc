package doctor

import (
	"errors"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/redirect/kernel"
	"github.com/sluice-proxy/sluice/redirect/kubeproxy"
)

// Engine is a network policy engine.
type Engine struct {
	Name    string
	Follows string // what follows for the data paths
	chains  []string
	table   string // of nftables
}

// What follows from how an engine judges packets; docs/network-policy.md has the tests.
const (
	atInterfaces = "with the relay, ingress policies do not hold between pods of one node, and egress policies see the Service's address; they hold for what --datapath kernel forwards"
	byAddresses  = "with the relay and --conntrack bypass, servers that may open nothing cannot answer"
	elsewhere    = "it judges packets outside of netfilter, which was not tried with Sluice"
	queued       = "it judges packets in userspace, which was not tried with Sluice"
)

// engines are recognised by the names of their chains and tables.
var engines = []Engine{
	{"Calico", atInterfaces, []string{"cali-"}, "calico"},
	{"kube-router", byAddresses, []string{"KUBE-ROUTER-", "KUBE-POD-FW-", "KUBE-NWPLCY-"}, ""},
	{"Antrea", elsewhere, []string{"ANTREA-"}, ""},
	{"Cilium", elsewhere, []string{"CILIUM_"}, ""},
	{"kube-network-policies", queued, nil, "kube-network-policies"},
}

// policyEngines returns the known engines whose rules are in nftables or iptables.
func policyEngines() ([]Engine, error) {
	_, chains, err := kubeproxy.NFTChains(0)
	var names, tables []string
	for _, c := range chains {
		names, tables = append(names, c.Name), append(tables, c.Table.Name)
	}
	legacyErr := kernel.LegacyChains(func(_, chain string) { names = append(names, chain) })
	return enginesOf(names, tables), errors.Join(err, legacyErr)
}

// enginesOf returns the engines that have one of the chains or tables.
func enginesOf(chains, tables []string) (found []Engine) {
	for _, e := range engines {
		has := e.table != "" && slices.Contains(tables, e.table)
		for _, prefix := range e.chains {
			has = has || slices.ContainsFunc(chains, func(c string) bool { return strings.HasPrefix(c, prefix) })
		}
		if has {
			found = append(found, e)
		}
	}
	return found
}
