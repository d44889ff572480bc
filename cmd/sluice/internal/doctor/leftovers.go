package doctor

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/redirect/kernel"
	"github.com/sluice-proxy/sluice/redirect/kubeproxy"
)

// What kube-proxy makes.
const (
	kubeProxyTable  = "kube-proxy" // of its nftables mode, in the families ip and ip6
	kubeProxyChains = "KUBE-"      // of its iptables and IPVS modes
	kubeProxyDummy  = "kube-ipvs0" // the interface of its IPVS mode
)

// leftovers names what is there of kube-proxy's. What could not be looked at is
// in the error.
func leftovers() ([]string, error) {
	var found []string
	var errs []error
	for _, look := range []func() ([]string, error){inNFTables, inLegacyIPTables, inInterfaces} {
		some, err := look()
		found = append(found, some...)
		errs = append(errs, err)
	}
	return found, errors.Join(errs...)
}

// inNFTables looks at all tables; those of iptables-nft are among them.
func inNFTables() ([]string, error) {
	_, chains, err := kubeproxy.NFTChains(0)
	if err != nil {
		return nil, err
	}
	var found []string
	count := 0
	for _, c := range chains {
		switch {
		case c.Table.Name == kubeProxyTable:
			found = append(found, "the nftables table "+kubeProxyTable)
		case kubeproxy.IsChain(c.Name):
			count++
		}
	}
	found = slices.Compact(found)
	if count > 0 {
		found = append(found, fmt.Sprintf("%d iptables-nft chains %s…", count, kubeProxyChains))
	}
	return found, nil
}

// inLegacyIPTables counts kube-proxy's chains of iptables-legacy.
func inLegacyIPTables() ([]string, error) {
	counts := make(map[string]int)
	err := kernel.LegacyChains(func(program, chain string) {
		if kubeproxy.IsChain(chain) {
			counts[program]++
		}
	})
	var found []string
	for _, program := range slices.Sorted(maps.Keys(counts)) {
		found = append(found, fmt.Sprintf("%d chains %s… of %s-legacy", counts[program], kubeProxyChains, program))
	}
	return found, err
}

func inInterfaces() ([]string, error) {
	_, err := netlink.LinkByName(kubeProxyDummy)
	var none netlink.LinkNotFoundError
	switch {
	case errors.As(err, &none):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("interface %s: %w", kubeProxyDummy, err)
	}
	return []string{"the interface " + kubeProxyDummy}, nil
}
