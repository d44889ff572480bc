package iptables

import (
	"errors"
	"fmt"
	"slices"
	"syscall"

	"github.com/google/nftables"
)

// The nft variant makes tables and built-in chains when they are first used, and
// leaves them empty afterwards. To remove them later, we note what was made for us by
// the names of empty chains of ours, which outlive this process: SLUICE-MADE-TABLE,
// SLUICE-MADE-INPUT.
const (
	madePrefix = "MADE-"
	madeTable  = "TABLE"
)

var nftFamilies = [versions]nftables.TableFamily{nftables.TableFamilyIPv4, nftables.TableFamilyIPv6}

// marksOfMaking returns the chains that note what is about to be made in a
// table, for rules at the heads of some built-in chains, and those that were
// noted before. The legacy variant has all tables and chains anyway.
func (t *tables) marksOfMaking(table string, heads []string, now *present) ([]string, error) {
	if t.tools.variant != NFT {
		return nil, nil
	}
	chains, exists, err := t.nftChains(table)
	if err != nil {
		return nil, err
	}
	prefix := chainPrefix(t.name) + madePrefix
	var marks []string
	note := func(what string, there bool) {
		if !there || slices.Contains(now.chains[table], prefix+what) {
			marks = append(marks, prefix+what)
		}
	}
	note(madeTable, exists)
	for _, c := range chainsOf[table] {
		if c[1] != "" && !t.detached {
			_, there := chains[c[1]]
			note(c[1], there || !slices.Contains(heads, c[1]))
		}
	}
	return marks, nil
}

// unmake removes tables and built-in chains that were made for us, unless another
// program uses them by now.
func (t *tables) unmake(made map[string][]string) error {
	for table, what := range made {
		if err := t.unmakeIn(table, what); err != nil && !errors.Is(err, syscall.ENOENT) {
			return fmt.Errorf("table %s: remove what is empty: %w", table, err)
		}
	}
	return nil
}

func (t *tables) unmakeIn(table string, what []string) error {
	chains, exists, err := t.nftChains(table)
	if err != nil || !exists {
		return err
	}
	conn, err := t.nftConn()
	if err != nil {
		return err
	}
	left := len(chains)
	nft := &nftables.Table{Name: table, Family: nftFamilies[t.v]}
	for _, name := range what {
		c, there := chains[name]
		if !there || c.Policy != nil && *c.Policy != nftables.ChainPolicyAccept {
			continue
		}
		rules, err := conn.GetRules(nft, c)
		if err != nil {
			return err
		}
		if len(rules) == 0 {
			conn.DelChain(c)
			left--
		}
	}
	if left == 0 && slices.Contains(what, madeTable) {
		conn.DelTable(nft)
	}
	return conn.Flush()
}

// nftChains returns the chains of a table by their names.
func (t *tables) nftChains(table string) (chains map[string]*nftables.Chain, exists bool, err error) {
	conn, err := t.nftConn()
	if err != nil {
		return nil, false, err
	}
	tables, err := conn.ListTablesOfFamily(nftFamilies[t.v])
	if err != nil {
		return nil, false, fmt.Errorf("nftables: list tables: %w", err)
	}
	if !slices.ContainsFunc(tables, func(n *nftables.Table) bool { return n.Name == table }) {
		return nil, false, nil
	}
	all, err := conn.ListChainsOfTableFamily(nftFamilies[t.v])
	if err != nil {
		return nil, false, fmt.Errorf("nftables: list chains: %w", err)
	}
	chains = map[string]*nftables.Chain{}
	for _, c := range all {
		if c.Table.Name == table {
			chains[c.Name] = c
		}
	}
	return chains, true, nil
}

func (t *tables) nftConn() (*nftables.Conn, error) {
	conn, err := nftables.New(nftables.WithNetNSFd(t.tools.ns.fd()))
	if err != nil {
		return nil, fmt.Errorf("nftables: %w", err)
	}
	return conn, nil
}
