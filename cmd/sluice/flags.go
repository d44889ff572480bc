package main

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/internal/nearest"
	"github.com/sluice-proxy/sluice/service"
)

// noArguments rejects arguments and says what was probably meant; usually a flag's
// name was forgotten.
func noArguments(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	if cmd.HasSubCommands() {
		text := fmt.Sprintf("unknown command %q", args[0])
		if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
			text += fmt.Sprintf("; did you mean %q?", near[0])
		}
		return fmt.Errorf("%s (%s --help lists them)", text, cmd.CommandPath())
	}
	return fmt.Errorf("%s takes no arguments, only flags: %q is one too many (%s --help lists the flags)", cmd.CommandPath(), args[0], cmd.CommandPath())
}

// explainFlagError adds a suggestion to pflag's error.
func explainFlagError(cmd *cobra.Command, err error) error {
	text := err.Error()
	name, unknown := strings.CutPrefix(text, "unknown flag: --")
	if !unknown {
		return fmt.Errorf("%s (%s --help explains the flags)", text, cmd.CommandPath())
	}
	if near := nearestFlag(cmd.Flags(), name); near != "" {
		return fmt.Errorf("%s; did you mean --%s?", text, near)
	}
	return fmt.Errorf("%s (%s --help lists the flags)", text, cmd.CommandPath())
}

// nearestFlag returns the flag that was probably meant, or "".
func nearestFlag(flags *pflag.FlagSet, name string) string {
	var names []string
	flags.VisitAll(func(f *pflag.Flag) { names = append(names, f.Name) })
	return nearest.Name(name, len(name)/3+2, slices.Values(names))
}

// between returns an error unless a flag's value is in a range.
func between[T cmp.Ordered](flag string, value, least, most T) error {
	if value < least || value > most {
		return fmt.Errorf("--%s: %v is not between %v and %v", flag, value, least, most)
	}
	return nil
}

// offOrSeconds returns an error unless a flag's value is 0, or a second at least.
func offOrSeconds(flag string, value time.Duration) error {
	if value < 0 || value > 0 && value < time.Second {
		return fmt.Errorf("--%s: %s is shorter than a second; 0 switches it off", flag, value)
	}
	return nil
}

// choice is a flag that takes one of a few words.
type choice struct {
	value   string
	allowed []string
}

// newChoice returns a choice whose default is the first of the words.
func newChoice(words ...string) choice { return choice{value: words[0], allowed: words} }

// register adds the flag to a command.
func (c *choice) register(cmd *cobra.Command, name, short, usage string) {
	cmd.Flags().VarP(c, name, short, usage)
}

func (c *choice) String() string  { return c.value }
func (c *choice) Type() string    { return strings.Join(c.allowed, "|") }
func (c *choice) words() []string { return c.allowed }

// completeChoices has the shell complete the flags of a command, and of those below it,
// that take one of a few words.
func completeChoices(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if c, ok := f.Value.(interface{ words() []string }); ok {
			completeValues(cmd, f.Name, c.words())
		}
	})
	for _, below := range cmd.Commands() {
		completeChoices(below)
	}
}

func (c *choice) Set(s string) error {
	if !slices.Contains(c.allowed, s) {
		return fmt.Errorf("%q is not one of %s", s, strings.Join(c.allowed, ", "))
	}
	c.value = s
	return nil
}

// lateChoice is a choice that is checked when the value is used: kube-proxy reads no
// value of a flag that its configuration file overrides. Empty means the default.
type lateChoice struct {
	choice
	byDefault string
}

func (c *lateChoice) Set(s string) error {
	c.value = cmp.Or(s, c.byDefault)
	return nil
}

// check returns an error for a value that does not exist.
func (c *lateChoice) check() error {
	if c.value == c.byDefault {
		return nil
	}
	return c.choice.Set(c.value)
}

// joined returns the values of a flag that takes several.
func joined[T fmt.Stringer](list []T) string {
	texts := make([]string, len(list))
	for i, v := range list {
		texts[i] = v.String()
	}
	return strings.Join(texts, ",")
}

// parsed reads values that are separated by commas.
func parsed[T any](s string, parse func(string) (T, error)) ([]T, error) {
	var list []T
	for part := range strings.SplitSeq(s, ",") {
		v, err := parse(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, nil
}

// prefixes is a flag that takes CIDRs, separated by commas or repeated.
type prefixes []netip.Prefix

func (p *prefixes) Type() string   { return "CIDR,..." }
func (p *prefixes) String() string { return joined(*p) }

func (p *prefixes) Set(s string) error {
	list, err := parsed(s, parsePrefix)
	*p = append(*p, list...)
	return err
}

// externalIPs is a flag that takes all, none, or ranges.
type externalIPs struct{ service.ExternalIPs }

func (e *externalIPs) Type() string  { return "all|none|CIDR,..." }
func (*externalIPs) words() []string { return []string{"all", "none"} }

func (e *externalIPs) String() string {
	switch list := prefixes(e.Ranges); {
	case e.None:
		return "none"
	case len(list) > 0:
		return list.String()
	}
	return "all"
}

func (e *externalIPs) Set(s string) error {
	switch s {
	case "all", "none":
		e.ExternalIPs = service.ExternalIPs{None: s == "none"}
		return nil
	}
	var list prefixes
	if err := list.Set(s); err != nil {
		return fmt.Errorf("%w; all and none are possible too", err)
	}
	e.ExternalIPs = service.ExternalIPs{Ranges: append(e.Ranges, list...)}
	return nil
}

// latePrefixes are prefixes that are checked when they are used, as a lateChoice is.
// Empty means none.
type latePrefixes struct {
	prefixes
	wrong error
}

func (p *latePrefixes) Set(s string) error {
	if s != "" && p.wrong == nil {
		p.wrong = p.prefixes.Set(s)
	}
	return nil
}

func parsePrefix(s string) (netip.Prefix, error) {
	prefix, err := netip.ParsePrefix(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not a CIDR such as 10.96.0.0/12 or fd00:10:96::/112", s)
	}
	if prefix.Addr().Is4In6() {
		return netip.Prefix{}, fmt.Errorf("%q is an IPv4 range written as IPv6: write %s/%d", s, prefix.Addr().Unmap(), max(prefix.Bits()-96, 0))
	}
	if prefix != prefix.Masked() {
		return netip.Prefix{}, fmt.Errorf("%q has bits set behind its length: write %s", s, prefix.Masked())
	}
	return prefix, nil
}

// addresses is a flag that takes IP addresses, separated by commas or repeated.
type addresses []netip.Addr

func (a *addresses) Type() string   { return "IP,..." }
func (a *addresses) String() string { return joined(*a) }

func (a *addresses) Set(s string) error {
	list, err := parsed(s, func(part string) (netip.Addr, error) {
		addr, err := netip.ParseAddr(part)
		if err != nil || addr.Zone() != "" {
			return addr, fmt.Errorf("%q is not an IP address such as 192.0.2.1 or 2001:db8::1", part)
		}
		return addr.Unmap(), nil
	})
	*a = append(*a, list...)
	return err
}

// durations is a flag that takes durations separated by commas.
type durations []time.Duration

func (d *durations) Type() string   { return "duration,..." }
func (d *durations) String() string { return joined(*d) }

func (d *durations) Set(s string) error {
	list, err := parsed(s, func(part string) (time.Duration, error) {
		v, err := time.ParseDuration(part)
		if err != nil || v <= 0 {
			return v, fmt.Errorf("%q is not a list of durations such as 250ms,500ms,1s,2s", s)
		}
		return v, nil
	})
	if err == nil {
		*d = list
	}
	return err
}
