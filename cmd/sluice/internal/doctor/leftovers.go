package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"

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

// legacyPatience bounds a call of iptables-legacy-save, which waits for others.
const legacyPatience = 2 * time.Second

// inLegacyIPTables counts kube-proxy's chains of iptables-legacy.
func inLegacyIPTables() ([]string, error) {
	return eachLegacy(func(program, rules string) string {
		if n := countChains(rules); n > 0 {
			return fmt.Sprintf("%d chains %s… of %s", n, kubeProxyChains, program)
		}
		return ""
	})
}

// eachLegacy looks at the tables of iptables-legacy, if there are any: the
// kernel lists their names, and the program what is in them. It gives what look
// says of each family, unless that is "".
func eachLegacy(look func(program, rules string) string) ([]string, error) {
	var found []string
	var errs []error
	for _, f := range []struct{ names, program string }{
		{"/proc/net/ip_tables_names", "iptables-legacy-save"},
		{"/proc/net/ip6_tables_names", "ip6tables-legacy-save"},
	} {
		names, err := os.ReadFile(f.names)
		if err != nil || len(bytes.TrimSpace(names)) == 0 {
			continue // no such module, or no table
		}
		ctx, cancel := context.WithTimeout(context.Background(), legacyPatience)
		rules, err := exec.CommandContext(ctx, f.program).Output()
		cancel()
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", f.program, err))
			continue
		}
		if text := look(strings.TrimSuffix(f.program, "-save"), string(rules)); text != "" {
			found = append(found, text)
		}
	}
	return found, errors.Join(errs...)
}

// countChains counts kube-proxy's in the output of iptables-save, where a chain
// is a line such as ":KUBE-SERVICES - [0:0]".
func countChains(rules string) (n int) {
	for line := range strings.Lines(rules) {
		name, isChain := strings.CutPrefix(line, ":")
		name, _, _ = strings.Cut(name, " ")
		if isChain && kubeproxy.IsChain(name) {
			n++
		}
	}
	return n
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
