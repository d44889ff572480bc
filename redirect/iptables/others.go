package iptables

import (
	"cmp"
	"errors"
	"slices"
	"strings"
)

// RemoveChains removes chains of somebody else's, with the rules of built-in
// chains that lead there, in both address families and every variant of
// iptables that the node has. A chain that a third one's chain leads to stays.
// It gives a line for each chain that it removed, and the rules that were in
// them as iptables-save writes them. netNS is a descriptor of the network
// namespace; 0 is the one that it is called in. Where there is no iptables,
// there is nothing to remove.
func RemoveChains(netNS int, theirs func(chain string) bool) (removed, rules []string, err error) {
	ns, err := openNamespace(netNS)
	if err != nil {
		return nil, nil, err
	}
	defer ns.close()
	var errs []error
	for _, t := range installed(ns) {
		for v := range versions {
			save, restore := t.programs[families[v].program+"-save"], t.programs[families[v].program+"-restore"]
			if save == "" || restore == "" || !ns.hasFamily(v) {
				continue
			}
			text, err := ns.run("", save)
			if err != nil {
				continue // a variant that the kernel does not have
			}
			o := parseOthers(text, theirs)
			if len(o.chains) == 0 {
				continue
			}
			if _, err := ns.run(o.removal(), restore, "--noflush", "-w"); err != nil {
				errs = append(errs, err)
				continue
			}
			for _, c := range o.chains {
				removed = append(removed, families[v].program+" ("+string(t.variant)+") "+c.table+" chain "+c.name)
			}
			rules = append(rules, o.rules...)
		}
	}
	return removed, rules, errors.Join(errs...)
}

// others are the chains to remove of one family and variant.
type others struct {
	chains []tableChain
	jumps  []tableChain // rules that lead there, with -D for -A
	rules  []string     // the rules in the chains
}

type tableChain struct{ table, name string }

// parseOthers reads what iptables-save writes.
func parseOthers(text string, theirs func(chain string) bool) others {
	var o others
	var table string
	builtin, matched, keep := map[tableChain]bool{}, map[tableChain]bool{}, map[tableChain]bool{}
	type jump struct{ from, to, rule tableChain }
	var jumps []jump
	for line := range strings.Lines(text) {
		words := strings.Fields(line)
		switch {
		case len(words) == 0:
		case words[0][0] == '*':
			table = words[0][1:]
		case words[0][0] == ':' && len(words) > 1:
			c := tableChain{table, words[0][1:]}
			builtin[c] = words[1] != "-"
			if !builtin[c] && theirs(c.name) {
				matched[c] = true
			}
		case words[0] == "-A" && len(words) > 1:
			from := tableChain{table, words[1]}
			if i := slices.IndexFunc(words, func(w string) bool { return w == "-j" || w == "-g" }); i >= 0 && i+1 < len(words) {
				jumps = append(jumps, jump{from, tableChain{table, words[i+1]}, tableChain{table, strings.TrimSpace(line)}})
			}
			if matched[from] {
				o.rules = append(o.rules, strings.TrimSpace(line))
			}
		}
	}
	for _, j := range jumps {
		if matched[j.to] && !matched[j.from] && !builtin[j.from] {
			keep[j.to] = true
		}
	}
	for c := range keep {
		delete(matched, c)
	}
	for _, j := range jumps {
		if matched[j.to] && builtin[j.from] {
			o.jumps = append(o.jumps, tableChain{j.rule.table, "-D" + strings.TrimPrefix(j.rule.name, "-A")})
		}
	}
	for c := range matched {
		o.chains = append(o.chains, c)
	}
	slices.SortFunc(o.chains, func(a, b tableChain) int { return cmp.Or(cmp.Compare(a.table, b.table), cmp.Compare(a.name, b.name)) })
	return o
}

// removal is what iptables-restore removes them by: a chain that is declared is
// emptied, so that no order of removing is wrong.
func (o *others) removal() string {
	var b strings.Builder
	for i, c := range o.chains {
		if i > 0 && o.chains[i-1].table == c.table {
			continue
		}
		b.WriteString("*" + c.table + "\n")
		inTable := func(each func(tableChain), list []tableChain) {
			for _, k := range list {
				if k.table == c.table {
					each(k)
				}
			}
		}
		inTable(func(k tableChain) { b.WriteString(":" + k.name + " - [0:0]\n") }, o.chains)
		inTable(func(k tableChain) { b.WriteString(k.name + "\n") }, o.jumps)
		inTable(func(k tableChain) { b.WriteString("-X " + k.name + "\n") }, o.chains)
		b.WriteString("COMMIT\n")
	}
	return b.String()
}
