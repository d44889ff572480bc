package iptables

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/redirect"
)

// tables keeps our chains of one family.
type tables struct {
	tools *tools
	v     version
	name  string // may be another than that of opts, to try something
	opts  Options
	// detached leaves out the rules that lead to our chains, to try them.
	detached bool

	text  ruleset // the rules as they were written last; zero if that is not known
	frame string  // our part of the tables as they were read after that; "" until then
	moved time.Time
}

// waitForLock is how many seconds a program waits for another that changes
// rules at the same time.
const waitForLock = "10"

// movePeriod bounds how often our rules return to the head of a chain after other
// programs put theirs before them: another program may insist on the head as well.
const movePeriod = 30 * time.Second

func (t *tables) program(suffix string) string { return t.tools.programs[families[t.v].program+suffix] }

// restore gives a text to iptables-restore, which changes each table that the text
// names in one transaction, and nothing else.
func (t *tables) restore(text string) (string, error) {
	return t.tools.ns.run(text, t.program("-restore"), "--noflush", "-w", waitForLock)
}

// apply writes the rules if they differ. It reads the tables only if it does not know
// their contents, or if writing failed.
func (t *tables) apply(want *contents, sets bool) error {
	text := t.rules(want, sets)
	if t.text == text || t.rewrite(text) {
		return nil
	}
	now, err := t.read()
	if err == nil && t.text == (ruleset{}) && t.frame == "" {
		err = t.clash(now)
	}
	if err != nil {
		return err
	}
	return t.write(text, now)
}

// rewrite writes the tables that differ from what was written last, if there are
// rules at the heads of the same built-in chains, and reports whether it could.
func (t *tables) rewrite(text ruleset) (done bool) {
	if t.text == (ruleset{}) {
		return false
	}
	var b strings.Builder
	for i, table := range tableNames {
		switch {
		case text[i] == t.text[i]:
		case slices.Equal(t.heads(table, text[i]), t.heads(table, t.text[i])):
			t.begin(&b, table)
			b.WriteString(text[i] + "COMMIT\n")
		default:
			return false
		}
	}
	t.text, t.frame = ruleset{}, ""
	if _, err := t.restore(b.String()); err != nil {
		return false
	}
	t.text = text
	return true
}

// begin begins a table, with our chains in it empty.
func (t *tables) begin(b *strings.Builder, table string) {
	b.WriteString("*" + table + "\n")
	for _, c := range chainsOf[table] {
		b.WriteString(":" + chainPrefix(t.name) + c[0] + " - [0:0]\n")
	}
}

func (t *tables) rules(want *contents, sets bool) ruleset {
	w := newWriter(t.v, t.name, t.opts, want, sets)
	w.connmark = !t.tools.noConnmark
	return w.rules()
}

// write puts rules in force, and ours at the heads of the built-in chains.
func (t *tables) write(text ruleset, now *present) error {
	t.text, t.frame = ruleset{}, ""
	prefix := chainPrefix(t.name)
	var b strings.Builder
	for i, table := range tableNames {
		t.begin(&b, table)
		heads := t.heads(table, text[i])
		marks, err := t.marksOfMaking(table, heads, now)
		if err != nil {
			return err
		}
		for _, chain := range marks {
			b.WriteString(":" + chain + " - [0:0]\n")
		}
		b.WriteString(text[i])
		if !t.detached {
			now.dropJumps(&b, table)
		}
		for _, chain := range heads {
			fmt.Fprintf(&b, "-I %s 1 -j %s\n", chain, prefix+chain)
		}
		b.WriteString("COMMIT\n")
	}
	if _, err := t.restore(b.String()); err != nil {
		return err
	}
	t.text = text
	return nil
}

// heads returns the built-in chains of a table at whose heads there is a rule of
// ours: those for which there are any rules. Every packet of the node passes
// them.
func (t *tables) heads(table, text string) (chains []string) {
	for _, c := range chainsOf[table] {
		if c[1] != "" && !t.detached && strings.Contains(text, "-A "+chainPrefix(t.name)+c[0]+" ") {
			chains = append(chains, c[1])
		}
	}
	return chains
}

// allHeads is how many rules of ours there are at the heads of built-in chains.
func (t *tables) allHeads() (n int) {
	for i, table := range tableNames {
		n += len(t.heads(table, t.text[i]))
	}
	return n
}

// verify compares the tables with what was written, and writes it again if they
// differ. The program prints our rules in a form of its own, so that only the number
// of rules is compared until they have been read once.
func (t *tables) verify(want *contents, sets bool) (repaired bool, err error) {
	text := t.rules(want, sets)
	now, err := t.read()
	if err != nil {
		return false, err
	}
	if t.text == text && (t.frame == now.frame || t.frame == "" && t.counted(now)) {
		t.frame = now.frame
		if now.atHead == t.allHeads() || time.Since(t.moved) < movePeriod {
			return false, nil
		}
		t.moved = time.Now()
	}
	return true, t.write(text, now)
}

// counted reports whether there are as many rules in each of our chains, and as
// many that lead there, as were written.
func (t *tables) counted(now *present) bool {
	for i, table := range tableNames {
		rules := map[string]int{}
		for line := range strings.Lines(t.text[i]) {
			chain, _, _ := strings.Cut(line[len("-A "):], " ")
			rules[chain]++
		}
		if !maps.Equal(rules, now.rules[table]) || len(now.jumps[table]) != len(t.heads(table, t.text[i])) {
			return false
		}
	}
	return true
}

// present is somebody's part of the tables, as iptables-save tells it; ours, unless
// said otherwise.
type present struct {
	frame  string                    // our chains and rules, and those that lead there
	chains map[string][]string       // names of our chains by table
	rules  map[string]map[string]int // how many there are in our chains, by table and chain
	jumps  map[string][]jump         // rules of others' chains that lead to ours, by table
	atHead int                       // how many of those are the first of their chain, one for each
}

// jump is a rule that leads from one chain to another.
type jump struct {
	to, rule string // "-A PREROUTING …"
	builtin  bool   // it is in a built-in chain
}

// read asks iptables-save. Where there is no table yet, it makes none.
func (t *tables) read() (*present, error) {
	out, err := t.tools.ns.run("", t.program("-save"))
	if err != nil {
		return nil, err
	}
	return parseSave(out, func(chain string) bool { return isOurName(chain, chainPrefix(t.name)) }), nil
}

// parseSave picks what is ours out of the tables in the form of iptables-save.
func parseSave(text string, ours func(chain string) bool) *present {
	p := &present{chains: map[string][]string{}, rules: map[string]map[string]int{}, jumps: map[string][]jump{}}
	var frame strings.Builder
	table := ""
	builtin, seen := map[string]bool{}, map[string]bool{}
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		rule, isRule := strings.CutPrefix(line, "-A ")
		chain, rest, _ := strings.Cut(rule, " ")
		switch {
		case strings.HasPrefix(line, "*"):
			table = line[1:]
			builtin, seen = map[string]bool{}, map[string]bool{}
			p.rules[table] = map[string]int{}
			frame.WriteString(line + "\n")
		case strings.HasPrefix(line, ":"):
			chain = chain[1:]
			if builtin[chain] = !strings.HasPrefix(rest, "-"); !builtin[chain] && ours(chain) {
				p.chains[table] = append(p.chains[table], chain)
				frame.WriteString(":" + chain + "\n")
			}
		case isRule && ours(chain):
			p.rules[table][chain]++
			frame.WriteString(line + "\n")
		case isRule:
			if to := chainAfter(line); ours(to) {
				p.jumps[table] = append(p.jumps[table], jump{to, line, builtin[chain]})
				frame.WriteString(line + "\n")
				if !seen[chain] {
					p.atHead++
				}
			}
			seen[chain] = true
		}
	}
	p.frame = withoutEmpty(frame.String())
	return p
}

// chainAfter returns the chain that a rule leads to, which is its last word; "" if
// it leads to none.
func chainAfter(rule string) string {
	i := max(strings.LastIndex(rule, " -j "), strings.LastIndex(rule, " -g "))
	if i < 0 || strings.ContainsAny(rule[i+4:], " \"") {
		return ""
	}
	return rule[i+4:]
}

// dropJumps writes what takes the rules away that lead to our chains of a table.
func (p *present) dropJumps(b *strings.Builder, table string) {
	for _, j := range p.jumps[table] {
		b.WriteString("-D" + strings.TrimPrefix(j.rule, "-A") + "\n")
	}
}

// removal is what iptables-restore takes our chains away by, and every rule that
// leads there. A chain that is declared is emptied, so that no order of removing is
// wrong.
func (p *present) removal() string {
	var b strings.Builder
	for table, chains := range p.chains {
		b.WriteString("*" + table + "\n")
		for _, c := range chains {
			b.WriteString(":" + c + " - [0:0]\n")
		}
		p.dropJumps(&b, table)
		for _, c := range chains {
			b.WriteString("-X " + c + "\n")
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

// isOurName reports whether a chain has the name of one of ours.
func isOurName(chain, prefix string) bool {
	name, ok := strings.CutPrefix(chain, prefix)
	if !ok {
		return false
	}
	if strings.HasPrefix(name, madePrefix) {
		return true
	}
	for _, list := range chainsOf {
		if slices.ContainsFunc(list, func(c [2]string) bool { return c[0] == name }) {
			return true
		}
	}
	return false
}

// isOurs reports whether the chains in a table are ours: all of ours are made at once,
// so that none is missing.
func (p *present) isOurs(table, prefix string) bool {
	return !slices.ContainsFunc(chainsOf[table], func(c [2]string) bool { return !slices.Contains(p.chains[table], prefix+c[0]) })
}

// clash returns an error if another program has chains with names of ours.
func (t *tables) clash(now *present) error {
	for _, table := range tableNames {
		if chains := now.chains[table]; len(chains) > 0 && !now.isOurs(table, chainPrefix(t.name)) {
			return &redirect.ClashError{
				What:   fmt.Sprintf("chain %s of %s -t %s", chains[0], families[t.v].program, table),
				Remedy: "give the proxy's chains another name (--nft-table), or remove that one",
			}
		}
	}
	return nil
}

// withoutEmpty leaves out tables that have nothing of ours: other programs decide
// which of these exist.
func withoutEmpty(frame string) string {
	var b strings.Builder
	for part := range strings.SplitAfterSeq(frame, "\n") {
		if strings.HasPrefix(part, "*") && (strings.HasSuffix(frame, part) || strings.Contains(frame, part+"*")) {
			continue
		}
		b.WriteString(part)
	}
	return b.String()
}

// remove takes our chains away and every rule that leads there, and gives a
// line for each chain.
func (t *tables) remove() (removed []string, err error) {
	t.text, t.frame = ruleset{}, ""
	if t.program("-save") == "" {
		return nil, nil
	}
	now, err := t.read()
	if err != nil {
		if t.tools.variant == Legacy && !denied(err) {
			return nil, nil // a kernel without ip_tables has nothing of ours there
		}
		return nil, err
	}
	made := map[string][]string{}
	for _, table := range tableNames {
		if !now.isOurs(table, chainPrefix(t.name)) {
			delete(now.chains, table)
		}
		slices.Sort(now.chains[table])
		for _, c := range now.chains[table] {
			if what, ok := strings.CutPrefix(c, chainPrefix(t.name)+madePrefix); ok {
				made[table] = append(made[table], what)
				continue
			}
			removed = append(removed, fmt.Sprintf("%s -t %s chain %s", families[t.v].program, table, c))
		}
	}
	if len(now.chains) == 0 {
		return nil, nil
	}
	if _, err := t.restore(now.removal()); err != nil {
		return nil, err
	}
	return removed, t.unmake(made)
}
