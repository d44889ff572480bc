package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/test/must"
)

// TestShellsCompleteWords: the shell completes each flag whose help lists words, in
// every command.
func TestShellsCompleteWords(t *testing.T) {
	count := 0
	for _, cmd := range below(newRootCommand()) {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			want := strings.Split(f.Value.Type(), "|")
			if len(want) == 1 {
				return
			}
			want = slices.DeleteFunc(want, func(w string) bool { return strings.ToUpper(w) == w }) // CIDR,... and FIRST-LAST
			count++
			var out bytes.Buffer
			root := newRootCommand()
			root.SetOut(&out)
			root.SetErr(&out)
			root.SetArgs(append(append([]string{"__complete"}, strings.Fields(cmd.CommandPath())[1:]...), "--"+f.Name, ""))
			must.OK(t, root.Execute())
			for _, word := range want {
				if !slices.Contains(strings.Fields(out.String()), word) {
					t.Errorf("%s --%s: %q, want %s", cmd.CommandPath(), f.Name, out.String(), want)
				}
			}
		})
	}
	if count < 40 {
		t.Errorf("%d flags, too few", count)
	}
}

// below returns a command and all those below it.
func below(cmd *cobra.Command) []*cobra.Command {
	all := []*cobra.Command{cmd}
	for _, c := range cmd.Commands() {
		all = append(all, below(c)...)
	}
	return all
}
