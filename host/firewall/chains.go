package firewall

import (
	"errors"
	"fmt"
	"syscall"

	nft "github.com/google/nftables"
)

// Chains returns the chains of all nftables tables of a network namespace, those of
// iptables-nft among them, and the connection to read their rules by; none where the
// kernel has no nf_tables. netns is as for StateRule.
func Chains(netns int) (*nft.Conn, []*nft.Chain, error) {
	conn, err := nft.New(nft.WithNetNSFd(netns))
	if err != nil {
		return nil, nil, fmt.Errorf("nftables: %w", err)
	}
	chains, err := conn.ListChains()
	if err != nil && !NoTables(err) {
		return nil, nil, fmt.Errorf("nftables: %w", err)
	}
	return conn, chains, nil
}

// NoTables reports whether an error says that the kernel has no nf_tables.
func NoTables(err error) bool {
	return errors.Is(err, syscall.EINVAL) || errors.Is(err, syscall.EOPNOTSUPP) || errors.Is(err, syscall.EPROTONOSUPPORT)
}
