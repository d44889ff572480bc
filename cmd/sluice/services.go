package main

import (
	"net/url"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/live/api"
)

func newServicesCommand() *cobra.Command {
	o := new(lister)
	cmd := &cobra.Command{
		Use:   "services [FILTER]",
		Short: "List the ports of Services that the proxy serves",
		Long: `Services lists the ports of Services with their addresses, how many of their endpoints
are ready, and what this node has counted since the proxy started. In the form json,
each has its endpoints, its traffic policies and all counters.

` + filterHelp,
		Example: `  sluice services
  sluice services namespace=shop
  sluice services -o json | jq -r 'select(.endpoints == []) | .service'`,
		ValidArgsFunction: o.completeFilter,
		RunE: func(cmd *cobra.Command, args []string) error {
			query, err := filterQuery(args)
			if err != nil {
				return err
			}
			rows := func(a *api.Services) ([]api.Service, int) { return a.Services, a.Matched }
			return list(o, cmd, api.PathServices, query, rows, show.Services, "no Service matches")
		},
	}
	o.register(cmd, 1000)
	return cmd
}

func newEndpointsCommand() *cobra.Command {
	o := new(lister)
	cmd := &cobra.Command{
		Use:   "endpoints [FILTER]",
		Short: "List the endpoints of Services, with their pods, nodes and conditions",
		Long: `Endpoints lists the endpoints of each port of a Service, as the proxy knows them: also
those that are not ready or terminate. A port without an endpoint has a line too.

` + filterHelp,
		Example: `  sluice endpoints service=shop/cart
  sluice endpoints node=node-2
  sluice endpoints -o json | jq -r 'select(.ready | not) | .pod'`,
		ValidArgsFunction: o.completeFilter,
		RunE: func(cmd *cobra.Command, args []string) error {
			query, err := filterQuery(args)
			if err != nil {
				return err
			}
			return list(o, cmd, api.PathServices, query, endpointsOf, show.Endpoints, "no endpoint matches")
		},
	}
	o.register(cmd, 1000)
	return cmd
}

// endpointsOf returns the endpoints of a page of service ports, at least one row for each
// port, and how many rows there are at least in all.
func endpointsOf(a *api.Services) (rows []show.Endpoint, matched int) {
	for i := range a.Services {
		s := &a.Services[i]
		for _, e := range s.Endpoints {
			rows = append(rows, show.Endpoint{Service: s.Service, Protocol: s.Protocol, Endpoint: e})
		}
		if len(s.Endpoints) == 0 {
			rows = append(rows, show.Endpoint{Service: s.Service, Protocol: s.Protocol})
		}
	}
	return rows, len(rows) + a.Matched - len(a.Services)
}

// filterQuery returns the parameters of a request with a filter that was given as
// arguments.
func filterQuery(args []string) (url.Values, error) {
	text, err := parseFilter(args)
	return url.Values{"filter": {text}}, err
}
