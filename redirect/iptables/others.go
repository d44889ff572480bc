package iptables

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/sluice-proxy/sluice/host/kernel"
)

// RemoveLegacyChains removes chains of somebody else's from iptables-legacy, with the
// rules of built-in chains that lead there, in both address families. A chain that a
// third one's chain leads to stays. It gives a line for each chain that it removed, and
// the rules that were in them, or led there, as iptables-save writes them. left are
// chains that stay because there are no programs to remove them. netNS is a descriptor
// of the network namespace; 0 is the one that it is called in.
func RemoveLegacyChains(netNS int, theirs func(chain string) bool) (removed, rules, left []string, err error) {
	ns, err := openNamespace(netNS)
	if err != nil {
		return nil, nil, nil, err
	}
	defer ns.close()
	var errs []error
	var legacy []*tools
	for _, t := range installed(ns) {
		if t.variant == Legacy {
			legacy = append(legacy, t)
		}
	}
	for _, t := range legacy {
		for v := range versions {
			save, restore := t.programs[families[v].program+"-save"], t.programs[families[v].program+"-restore"]
			if save == "" || restore == "" || !ns.hasFamily(v) {
				continue
			}
			text, err := ns.run("", save)
			if err != nil {
				continue // a variant that the kernel does not have
			}
			o := parseSave(text, theirs)
			o.leaveUsed()
			if len(o.chains) == 0 {
				continue
			}
			if _, err := ns.run(o.removal(), restore, "--noflush", "-w"); err != nil {
				errs = append(errs, err)
				continue
			}
			for _, table := range slices.Sorted(maps.Keys(o.chains)) {
				for _, c := range slices.Sorted(slices.Values(o.chains[table])) {
					removed = append(removed, families[v].program+" ("+string(t.variant)+") "+table+" chain "+c)
				}
			}
			for line := range strings.Lines(o.frame) {
				if strings.HasPrefix(line, "-A ") {
					rules = append(rules, strings.TrimSpace(line))
				}
			}
		}
	}
	if len(errs) == 0 {
		left, err = legacyChains(ns, func(program, chain string) bool {
			return theirs(chain) && !slices.ContainsFunc(legacy, func(t *tools) bool { return t.programs[program+"-restore"] != "" })
		})
		errs = append(errs, err)
	}
	return removed, rules, left, errors.Join(errs...)
}

// legacyChains asks the kernel for the chains of iptables-legacy that are wanted.
func legacyChains(ns *namespace, wanted func(program, chain string) bool) (found []string, err error) {
	err = ns.do(func() error {
		return kernel.LegacyChains(func(program, chain string) {
			if wanted(program, chain) {
				found = append(found, chain)
			}
		})
	})
	return found, err
}

// leaveUsed forgets the chains that others' chains lead to.
func (p *present) leaveUsed() {
	for table, jumps := range p.jumps {
		for _, j := range jumps {
			if !j.builtin {
				p.chains[table] = slices.DeleteFunc(p.chains[table], func(c string) bool { return c == j.to })
			}
		}
		p.jumps[table] = slices.DeleteFunc(jumps, func(j jump) bool { return !slices.Contains(p.chains[table], j.to) })
	}
	maps.DeleteFunc(p.chains, func(_ string, chains []string) bool { return len(chains) == 0 })
}
