package main

import (
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/live/api"
)

// destinationsOptions are the flags of sluice destinations.
type destinationsOptions struct {
	asker
	output   choice
	steering choice
	limit    int
}

func newDestinationsCommand() *cobra.Command {
	o := &destinationsOptions{
		output:   newChoice("text", "json"),
		steering: choice{allowed: api.Steerings},
	}
	cmd := &cobra.Command{
		Use:   "destinations [TEXT]",
		Short: "List the addresses and ports that the proxy steers",
		Long: `Destinations lists the addresses and ports that the steering plan in force names,
and what happens there:

  steered    the proxy accepts what clients send there
  refused    the kernel refuses: the service port has no endpoint
  dropped    the kernel does not answer: the policy leaves no endpoint on this node
  own        a socket of the proxy is bound there: an address of this node
  lingering  gone, but connections to it go on

With TEXT it lists those whose address or service contains it.`,
		Example: `  sluice destinations
  sluice destinations shop/cart
  sluice destinations --steering refused`,
		ValidArgsFunction: o.complete("service"),
		Args:              cobra.MaximumNArgs(1),
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.register(cmd)
	f := cmd.Flags()
	o.output.register(cmd, "output", "o", "form of the output; json is one object on each line")
	o.steering.register(cmd, "steering", "", "only those to which this happens")
	f.IntVar(&o.limit, "limit", 1000, "show at most so many")
	return cmd
}

func (o *destinationsOptions) run(cmd *cobra.Command, args []string) error {
	if err := between("limit", o.limit, 1, api.MaxRows); err != nil {
		return err
	}
	ctx, c, err := o.find(cmd)
	if err != nil {
		return err
	}
	query := url.Values{"limit": {strconv.Itoa(o.limit)}, "steering": {o.steering.value}}
	if len(args) > 0 {
		query.Set("search", args[0])
	}
	var answer api.Destinations
	if err := c.Get(ctx, api.PathDestinations, query, &answer); err != nil {
		return err
	}
	switch {
	case o.output.value == "json":
		err = writeLines(cmd.OutOrStdout(), answer.Destinations)
	case len(answer.Destinations) == 0:
		cmd.PrintErrln("no destination matches")
	default:
		err = show.Destinations(cmd.OutOrStdout(), answer.Destinations)
	}
	if more := answer.Matched - len(answer.Destinations); err == nil && more > 0 {
		cmd.PrintErrf("and %d more: see --limit\n", more)
	}
	return err
}
