package firewall

import (
	"fmt"

	"github.com/sluice-proxy/sluice/host/kernel"
	"github.com/sluice-proxy/sluice/internal/sys"
)

// legacy looks at the tables of iptables-legacy in which packets are judged.
func legacy(own string) (found string, err error) {
	err = kernel.LegacyTables(func(x *sys.XTables, program, table string) error {
		if found != "" || table == "nat" {
			return nil
		}
		rules, err := x.Rules(table)
		for _, r := range rules {
			if !counts(r.Chain, own) || !r.Matches(isState) {
				continue
			}
			chain := "chain " + r.Chain
			if r.Chain == "" {
				chain = "a built-in chain"
			}
			found = fmt.Sprintf("%s of the table %s of %s-legacy", chain, table, program)
			break
		}
		return err
	})
	return found, err
}
