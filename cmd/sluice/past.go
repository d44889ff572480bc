package main

import (
	"cmp"
	"fmt"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/client"
)

// pastOptions are the flags of sluice log.
type pastOptions struct {
	asker
	output choice
	since  time.Duration
	limit  int
}

func newLogCommand() *cobra.Command {
	o := &pastOptions{output: newChoice("text", "json", "csv")}
	cmd := &cobra.Command{
		Use:   "log [FILTER]",
		Short: "Show connections that ended a while ago",
		Long: `Log shows the records of connections and UDP sessions that ended, the oldest first.
The proxy keeps the last ones in memory, whatever the access log leaves out: some
8,000 for each MiB of --past of sluice run. It says so where they do not go back as
far as --since, and how many are missing because there were too many at once.

` + filterHelp,
		Example: `  sluice log client=10.1.2.3 --since 1h
  sluice log service=shop/cart end=endpoint_reset,connect_failed
  sluice log 'first_byte>1s' --limit 100 -o csv > slow.csv`,
		ValidArgsFunction: o.completeFilter,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.register(cmd)
	f := cmd.Flags()
	o.output.register(cmd, "output", "o", "form of the output: lines of the access log in its console or its JSON form, or columns")
	f.DurationVar(&o.since, "since", 10*time.Minute, "show connections that ended within this time")
	f.IntVar(&o.limit, "limit", 0, "show at most so many, the last ones (default: all)")
	return cmd
}

func (o *pastOptions) run(cmd *cobra.Command, args []string) error {
	if o.since <= 0 {
		return fmt.Errorf("--since: %s is not positive", o.since)
	}
	if err := between("limit", o.limit, 0, 1<<30); err != nil {
		return err
	}
	ctx, c, filter, err := o.findFor(cmd, args)
	if err != nil {
		return err
	}
	since := time.Now().Add(-o.since)
	query := url.Values{"filter": {filter}, "since": {strconv.FormatFloat(float64(since.UnixMilli())/1000, 'f', 3, 64)}, "limit": {strconv.Itoa(o.limit)}}
	out := newConnsOutput(cmd.OutOrStdout(), cmd.ErrOrStderr(), o.output.value, "no connection that ended matches")
	var past *api.Past // the first line
	err = c.Stream(ctx, api.PathPast, query, func(line []byte) error {
		if past != nil {
			return out.line(line)
		}
		var first api.Connection
		if err := decode(line, &first); err != nil {
			return err
		}
		past = cmp.Or(first.Past, &api.Past{})
		return nil
	})
	if err == nil {
		err = out.end()
	}
	switch {
	case err != nil:
		return unlessGone(err)
	case past == nil:
		return client.ErrEnded
	}
	if past.Since.After(since) {
		cmd.PrintErrf("records go back to %s: see --past of sluice run\n", past.Since.Local().Format(time.DateTime))
	}
	if past.Lost > 0 {
		cmd.PrintErrf("%d records since then are missing, as there were too many at once\n", past.Lost)
	}
	return nil
}
