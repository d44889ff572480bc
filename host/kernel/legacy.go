package kernel

import (
	"fmt"
	"os"
	"strings"

	"github.com/sluice-proxy/sluice/internal/sys"
)

// LegacyTables calls visit with each table of iptables-legacy and ip6tables-legacy in the
// calling thread's network namespace, and the name of the program without "-legacy". It
// asks for none that the kernel has not made.
func LegacyTables(visit func(x *sys.XTables, program, table string) error) error {
	for _, program := range []string{"iptables", "ip6tables"} {
		names, err := os.ReadFile("/proc/thread-self/net/" + strings.Replace(program, "tables", "_tables_names", 1))
		if err != nil {
			continue // no such module
		}
		x, err := sys.OpenXTables(program == "ip6tables")
		if err != nil {
			continue // no IPv6
		}
		defer x.Close()
		for _, table := range strings.Fields(string(names)) {
			if err := visit(x, program, table); err != nil {
				return fmt.Errorf("%s-legacy: table %s: %w", program, table, err)
			}
		}
	}
	return nil
}

// LegacyChains calls visit with each chain of these tables that is not built in.
func LegacyChains(visit func(program, chain string)) error {
	return LegacyTables(func(x *sys.XTables, program, table string) error {
		chains, err := x.Chains(table)
		for _, c := range chains {
			visit(program, c)
		}
		return err
	})
}
