package main

import (
	"net/url"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/live/api"
)

// destinationsOptions are the flags of sluice destinations.
type destinationsOptions struct {
	lister
	steering choice
}

func newDestinationsCommand() *cobra.Command {
	o := &destinationsOptions{steering: choice{allowed: api.Steerings}}
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
	o.register(cmd, 1000)
	o.steering.register(cmd, "steering", "", "only those to which this happens")
	return cmd
}

func (o *destinationsOptions) run(cmd *cobra.Command, args []string) error {
	query := url.Values{"steering": {o.steering.value}}
	if len(args) > 0 {
		query.Set("search", args[0])
	}
	rows := func(a *api.Destinations) ([]api.Destination, int) { return a.Destinations, a.Matched }
	return list(&o.lister, cmd, api.PathDestinations, query, rows, show.Destinations, "no destination matches")
}
