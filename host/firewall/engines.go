package firewall

import (
	"errors"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/host/kernel"
)

// Engine is a network policy engine.
type Engine struct {
	Name   string
	Judges Judging
	chains []string // prefixes of the names of its chains
	table  string   // of nftables
}

// Judging is how an engine judges packets.
type Judging uint8

// The ways of judging.
const (
	AtInterfaces Judging = iota // by the interfaces of pods
	ByAddresses                 // by the addresses of pods
	Elsewhere                   // outside of netfilter
	InUserspace                 // by a queue of netfilter
)

// engines are recognised by the names of their chains and tables.
var engines = []Engine{
	{"Calico", AtInterfaces, []string{"cali-"}, "calico"},
	{"kube-router", ByAddresses, []string{"KUBE-ROUTER-", "KUBE-POD-FW-", "KUBE-NWPLCY-"}, ""},
	{"Antrea", Elsewhere, []string{"ANTREA-"}, ""},
	{"Cilium", Elsewhere, []string{"CILIUM_"}, ""},
	{"kube-network-policies", InUserspace, nil, "kube-network-policies"},
}

// hasChain reports whether a chain's name is one of the engine's.
func (e *Engine) hasChain(name string) bool {
	return slices.ContainsFunc(e.chains, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// Engines returns the known engines whose rules are in nftables or iptables, in the
// calling thread's network namespace.
func Engines() ([]Engine, error) {
	_, chains, err := Chains(0)
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
		if e.table != "" && slices.Contains(tables, e.table) || slices.ContainsFunc(chains, e.hasChain) {
			found = append(found, e)
		}
	}
	return found
}
