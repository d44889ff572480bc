package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/live/api"
)

// closeOptions are the flags of sluice close.
type closeOptions struct {
	asker
	limit  int
	dryRun bool
	yes    bool
}

func newCloseCommand() *cobra.Command {
	o := &closeOptions{}
	cmd := &cobra.Command{
		Use:   "close FILTER",
		Short: "End open connections",
		Long: `Close ends the connections and UDP sessions that match: both sides are reset, and
the record says end=admin. The endpoint stays in use for new connections; see
sluice drain. It is for the user that the proxy runs as, and for root.

` + filterHelp,
		Example: `  sluice close endpoint=10.244.1.7 --dry-run
  sluice close endpoint=10.244.1.7 --yes
  sluice close service=shop/cart 'duration>1h' --limit 100
  sluice close 'id>0' --yes                        # all`,
		ValidArgsFunction: o.completeFilter,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.register(cmd)
	f := cmd.Flags()
	f.IntVar(&o.limit, "limit", 0, "end at most so many (default: all that match)")
	f.BoolVar(&o.dryRun, "dry-run", false, "only say how many match")
	f.BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	return cmd
}

func (o *closeOptions) run(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return errors.New("which connections? give a filter, such as endpoint=10.244.1.7; 'id>0' selects all")
	}
	if o.limit < 0 {
		return fmt.Errorf("--limit: %d is negative", o.limit)
	}
	ctx, c, text, err := o.findFor(cmd, args)
	if err != nil {
		return err
	}
	asked := api.Close{Filter: text, Limit: o.limit, DryRun: true}
	var answer api.Closed
	if o.dryRun || !o.yes {
		if err := c.Act(ctx, api.PathClose, &asked, &answer); err != nil {
			return pointed(err)
		}
		if o.dryRun || answer.Matched == 0 {
			_, err := fmt.Fprintln(cmd.OutOrStdout(), counted(answer.Matched, "connection matches", "connections match"))
			return err
		}
		n := answer.Matched
		if o.limit > 0 {
			n = min(n, o.limit)
		}
		ok, err := confirm(ctx, cmd, fmt.Sprintf("end %s on node %s?", counted(n, "connection", "connections"), c.Version.Node))
		if err != nil || !ok {
			return err
		}
	}
	asked.DryRun = false
	if err := c.Act(ctx, api.PathClose, &asked, &answer); err != nil {
		return pointed(err)
	}
	_, err = fmt.Fprintln(cmd.OutOrStdout(), "ended "+counted(answer.Ended, "connection", "connections"))
	return err
}

// counted returns a number and its noun.
func counted(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
