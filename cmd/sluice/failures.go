package main

import (
	"io"
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/blame"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/live/api"
)

// failuresOptions are the flags of sluice failures.
type failuresOptions struct {
	lister
	endpoint, service string
	each              bool
}

func newFailuresCommand() *cobra.Command {
	o := new(failuresOptions)
	cmd := &cobra.Command{
		Use:   "failures",
		Short: "Say which endpoints failed last, who was refused, and why",
		Long: `Failures sums up the last attempts to connect to an endpoint that failed on this node,
the last connections that an endpoint reset or stopped answering, and the last packets of
clients that were refused or dropped: a row for each endpoint or Service and reason, with
their number, those with most failures first. --each lists each failure instead, newest
first. The proxy keeps 256 for each event loop, also while nobody asks. A failed attempt
is no failed connection: the proxy tries another endpoint.`,
		Example: `  sluice failures
  sluice failures --service shop/cart
  sluice failures -o json | jq -r 'select(.error == "endpoint_reset") | .pod'
  sluice failures --each --limit 1000`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.register(cmd, api.DefaultRows)
	f := cmd.Flags()
	f.StringVar(&o.endpoint, "endpoint", "", "only this endpoint: an address, or an address and port")
	f.StringVar(&o.service, "service", "", "only this service, NAMESPACE/NAME, or one port of it, NAMESPACE/NAME:PORT")
	f.BoolVar(&o.each, "each", false, "list each failure, newest first")
	completeFlag(cmd, "endpoint", o.complete("endpoint"))
	completeFlag(cmd, "service", o.complete("service"))
	return cmd
}

func (o *failuresOptions) run(cmd *cobra.Command) error {
	none := "no endpoint has failed"
	if o.endpoint != "" || o.service != "" {
		none = "no failure matches"
	}
	query := url.Values{"endpoint": {o.endpoint}, "service": {o.service}}
	if o.each {
		rows := func(a *api.Failures) ([]api.Failure, int) { return a.Failures, len(a.Failures) }
		table := func(out io.Writer, all []api.Failure) error { return show.Failures(out, all, time.Now()) }
		return list(&o.lister, cmd, api.PathFailures, query, rows, table, none)
	}
	query.Set("limit", strconv.Itoa(api.MaxRows))
	rows := func(a *api.Failures) ([]blame.Failures, int) {
		sums := blame.Sum(a.Failures)
		return sums, len(sums)
	}
	table := func(out io.Writer, all []blame.Failures) error { return show.Blame(out, all, time.Now()) }
	return list(&o.lister, cmd, api.PathFailures, query, rows, table, none)
}
