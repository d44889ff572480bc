package main

import (
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/live/api"
)

// failuresOptions are the flags of sluice failures.
type failuresOptions struct {
	asker
	output            choice
	endpoint, service string
	limit             int
}

func newFailuresCommand() *cobra.Command {
	o := &failuresOptions{output: newChoice("text", "json")}
	cmd := &cobra.Command{
		Use:   "failures",
		Short: "List the last failures of endpoints",
		Long: `Failures lists the last attempts to connect to an endpoint that failed on this node,
and the last connections that an endpoint reset or stopped answering, newest first.
The proxy keeps 256 for each event loop, also while nobody asks. A failed attempt is
no failed connection: the proxy tries another endpoint.`,
		Example: `  sluice failures
  sluice failures --service shop/cart
  sluice failures --limit 1000 -o json | jq -r '.endpoint + " " + .error' | sort | uniq -c`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.register(cmd)
	f := cmd.Flags()
	o.output.register(cmd, "output", "o", "form of the output; json is one object on each line")
	f.StringVar(&o.endpoint, "endpoint", "", "only this endpoint: an address, or an address and port")
	f.StringVar(&o.service, "service", "", "only this service, NAMESPACE/NAME, or one port of it, NAMESPACE/NAME:PORT")
	f.IntVar(&o.limit, "limit", api.DefaultRows, "show at most so many")
	completeFlag(cmd, "endpoint", o.complete("endpoint"))
	completeFlag(cmd, "service", o.complete("service"))
	return cmd
}

func (o *failuresOptions) run(cmd *cobra.Command) error {
	if err := between("limit", o.limit, 1, api.MaxRows); err != nil {
		return err
	}
	ctx, c, err := o.find(cmd)
	if err != nil {
		return err
	}
	query := url.Values{"limit": {strconv.Itoa(o.limit)}, "endpoint": {o.endpoint}, "service": {o.service}}
	var answer api.Failures
	if err := c.Get(ctx, api.PathFailures, query, &answer); err != nil {
		return err
	}
	if o.output.value == "json" {
		return writeLines(cmd.OutOrStdout(), answer.Failures)
	}
	if len(answer.Failures) == 0 {
		text := "no endpoint has failed"
		if o.endpoint != "" || o.service != "" {
			text = "no failure matches"
		}
		cmd.PrintErrln(text)
		return nil
	}
	return show.Failures(cmd.OutOrStdout(), answer.Failures, time.Now())
}
