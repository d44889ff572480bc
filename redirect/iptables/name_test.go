package iptables

import (
	"errors"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/steering"
)

// Promise 6: somebody else's chains are left alone by Cleanup, whatever their names
// begin with. Where one has a name of ours, Apply says so and changes nothing.
func TestSomebodyElsesChainsOfOurName(t *testing.T) {
	modes(t, func(t *testing.T, opts Options) {
		if opts.NoSets {
			return
		}
		lab := netns.NewLab(t, 0)
		opts.Routes.NetNS = lab.Node.FD()
		program1 := func(line string) {
			t.Helper()
			words := strings.Fields(strings.ReplaceAll(line, "iptables", "iptables-"+string(opts.Variant)))
			program(t, lab.Node.Namespace, words[0], words[1:]...)
		}
		const custom, taken = "SLUICE-CUSTOM", "SLUICE-REFUSE"
		for _, chain := range []string{custom, taken} {
			program1("iptables -t filter -N " + chain)
			program1("iptables -t filter -A " + chain + " -p sctp -j RETURN")
			program1("iptables -t filter -A INPUT -p sctp -j " + chain)
		}
		theirs := func() string {
			t.Helper()
			out := must.Get(lab.Node.Command(t, "iptables-"+string(opts.Variant)+"-save", "-t", "filter").Output())(t)
			var lines []string
			for line := range strings.Lines(string(out)) {
				if !strings.HasPrefix(line, "#") && strings.Contains(line, "SLUICE-") {
					lines = append(lines, strings.TrimSpace(line))
				}
			}
			return strings.Join(lines, "\n")
		}
		before := theirs()
		f := steering.NewFront(t, lab.Node, "front")
		plan := steering.Plan(steering.Steer(f, tcp("10.96.0.10:80")))
		r := must.Get(New(opts))(t)
		var clash *redirect.ClashError
		if err := r.Apply(plan); !errors.As(err, &clash) || !strings.Contains(err.Error(), "chain "+taken) {
			t.Errorf("apply: %v", err)
		}
		check.OK(t, r.Close())
		check.OK(t, must.Err(Cleanup(opts)))
		check.Textf(t, theirs(), before, "what is of others")
		program1("iptables -t filter -D INPUT -p sctp -j " + taken)
		program1("iptables -t filter -F " + taken)
		program1("iptables -t filter -X " + taken)
		before = theirs()
		again := newOne(t, lab.Node, opts)
		apply(t, again, plan)
		check.OK(t, again.Close())
		check.Textf(t, theirs(), before, "what is of others, beside ours")
	})
}
