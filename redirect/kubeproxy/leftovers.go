package kubeproxy

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/vishvananda/netlink"

	"github.com/sluice-proxy/sluice/host/firewall"
	"github.com/sluice-proxy/sluice/host/kernel"
)

// Leftovers names what is there of kube-proxy's in the calling thread's network namespace. What
// could not be looked at is in the error.
func Leftovers() ([]string, error) {
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
	_, chains, err := firewall.Chains(0)
	if err != nil {
		return nil, err
	}
	var found []string
	count := 0
	for _, c := range chains {
		switch {
		case c.Table.Name == table:
			found = append(found, "the nftables table "+table)
		case IsChain(c.Name):
			count++
		}
	}
	found = slices.Compact(found)
	if count > 0 {
		found = append(found, fmt.Sprintf("%d iptables-nft chains KUBE-…", count))
	}
	return found, nil
}

// inLegacyIPTables counts kube-proxy's chains of iptables-legacy.
func inLegacyIPTables() ([]string, error) {
	counts := make(map[string]int)
	err := kernel.LegacyChains(func(program, chain string) {
		if IsChain(chain) {
			counts[program]++
		}
	})
	var found []string
	for _, program := range slices.Sorted(maps.Keys(counts)) {
		found = append(found, fmt.Sprintf("%d chains KUBE-… of %s-legacy", counts[program], program))
	}
	return found, err
}

func inInterfaces() ([]string, error) {
	_, err := netlink.LinkByName(ipvsInterface)
	var none netlink.LinkNotFoundError
	switch {
	case errors.As(err, &none):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("interface "+ipvsInterface+": %w", err)
	}
	return []string{"the interface " + ipvsInterface}, nil
}
