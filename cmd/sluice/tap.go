package main

import (
	"cmp"
	"fmt"
	"net/url"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/live/api"
)

// tapFlags are what sluice tap has in common with sluice cluster tap.
type tapFlags struct {
	output choice
	opens  bool
	count  int
	rate   int
}

// terminalRate is how many records a second a terminal gets.
const terminalRate = 200

func (o *tapFlags) register(cmd *cobra.Command, output, rate string) {
	f := cmd.Flags()
	o.output = newChoice("text", "json")
	o.output.register(cmd, "output", "o", "form of the output: "+output)
	f.BoolVar(&o.opens, "opens", false, "also show connections when they have reached their endpoint")
	f.IntVar(&o.rate, "rate", -1, "records a second at most"+rate+"; more are only counted; 0 shows all (default: 200 on a terminal, else 0)")
	f.Lookup("rate").DefValue = "0" // the help says what -1 means
}

// check returns the error of a flag, and sets the rate that is the default.
func (o *tapFlags) check() error {
	if o.rate == -1 {
		o.rate = 0
		if isTerminal(os.Stdout) {
			o.rate = terminalRate
		}
	}
	return cmp.Or(between("rate", o.rate, 0, 1_000_000), between("count", o.count, 0, 1_000_000_000))
}

// query asks one of some nodes, which share the rate, for what matches a filter.
func (o *tapFlags) query(filter string, nodes int) url.Values {
	values := url.Values{"filter": {filter}, "rate": {strconv.Itoa((o.rate + nodes - 1) / nodes)}}
	if o.opens {
		values.Set("opens", "true")
	}
	return values
}

// tapOptions are the flags of sluice tap.
type tapOptions struct {
	asker
	tapFlags
}

func newTapCommand() *cobra.Command {
	o := &tapOptions{}
	cmd := &cobra.Command{
		Use:   "tap [FILTER]",
		Short: "Show connections as they end",
		Long: `Tap shows the record of each connection and UDP session when it ends, until Ctrl-C.
It sees all of them, whatever the access log leaves out, and delays none: if its
output is read too slowly, records are dropped, and it says how many.

` + filterHelp,
		Example: `  sluice tap
  sluice tap service=shop/cart --opens
  sluice tap end=endpoint_reset,endpoint_timeout,connect_failed
  sluice tap 'attempts>1' -o json | jq -r '.failed_attempts[].endpoint' | sort | uniq -c`,
		ValidArgsFunction: o.completeFilter,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.asker.register(cmd)
	o.tapFlags.register(cmd, "lines of the access log in its console or its JSON form", "")
	cmd.Flags().IntVarP(&o.count, "count", "n", 0, "exit after so many records (default: never)")
	return cmd
}

func (o *tapOptions) run(cmd *cobra.Command, args []string) error {
	if err := o.check(); err != nil {
		return err
	}
	ctx, c, text, err := o.findFor(cmd, args)
	if err != nil {
		return err
	}
	why := ", as they were read too slowly"
	if o.rate > 0 {
		why = fmt.Sprintf(", as there are more than %d a second: see --rate", o.rate)
	}
	out, shown := cmd.OutOrStdout(), 0
	return unlessGone(follow(ctx, c, api.PathTap, o.query(text, 1), func(line []byte, r *api.Connection) error {
		text := string(line)
		switch {
		case strings.HasPrefix(text, `{"lost":`):
			cmd.PrintErrf("%d records are not shown%s\n", r.Lost, why)
			return nil
		case o.output.value == "text":
			text = show.Line(r)
		}
		if _, err := fmt.Fprintln(out, text); err != nil {
			return err
		}
		if shown++; shown == o.count {
			return errEnough
		}
		return nil
	}))
}
