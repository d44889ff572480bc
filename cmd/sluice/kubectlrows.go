package main

import (
	"context"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/blame"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/merge"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/slow"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/top"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/client"
)

// clusterRows is the number of rows that commands over all nodes write by default.
const clusterRows = 1000

func registerRows(cmd *cobra.Command, limit *int) {
	cmd.Flags().IntVar(limit, "limit", clusterRows, "show at most so many rows, of all nodes together")
}

func newClusterConnsCommand() *cobra.Command {
	o, output, sort, limit := &clusterAsker{}, newChoice("table", "wide", "json", "csv"), "", 0
	cmd := &cobra.Command{
		Use:   "conns [FILTER]",
		Short: "List the open connections of all nodes",
		Long: `Conns lists the open connections that the proxies of all nodes have. PROXY NODE is the
node whose proxy has the connection: an ID is one of this node.

` + filterHelp,
		Example: `  kubectl sluice conns client=10.1.2.3 -o wide
  kubectl sluice conns pod=shop/cart-2
  kubectl sluice conns --sort=-bytes --limit 20`,
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := parseFilter(args)
			if err == nil {
				err = between("limit", limit, 1, api.MaxRows)
			}
			order := merge.Connections(sort)
			if _, wrong := live.ParseOrder(sort); err == nil && wrong != nil {
				err = fmt.Errorf("--%w", wrong)
			}
			if err != nil {
				return err
			}
			query := url.Values{"filter": {text}, "sort": {sort}, "limit": {strconv.Itoa(limit)}, "transport": {strconv.FormatBool(output.value != "table")}}
			rows, matched := merge.List[api.Connection]{Compare: order, Limit: limit}, 0
			return gather(o, cmd, 0, func(ctx context.Context, c *client.Client) (page api.Connections, err error) {
				return page, c.Get(ctx, api.PathConnections, query, &page)
			}, func(node string, page api.Connections) {
				for i := range page.Connections {
					page.Connections[i].ProxyNode = node
				}
				rows.Add(page.Connections)
				matched += page.Matched
			}, func() error {
				defer more(cmd, matched-len(rows.Rows))
				return writeConnections(cmd, output.value, rows.Rows)
			})
		},
	}
	o.register(cmd)
	output.register(cmd, "output", "o", "form of the output; json is one object a line, csv has the fields of json as columns")
	cmd.Flags().StringVar(&sort, "sort", "", "field to sort by, such as bytes, duration or client; with - before it the largest first (default: time)")
	registerRows(cmd, &limit)
	completeValues(cmd, "sort", live.Orders())
	return cmd
}

// writeConnections writes rows in one of the forms of conns.
func writeConnections(cmd *cobra.Command, form string, rows []api.Connection) error {
	if form == "json" {
		return writeLines(cmd.OutOrStdout(), rows)
	}
	out := newConnsOutput(cmd.OutOrStdout(), cmd.ErrOrStderr(), form, "no open connection matches")
	for i := range rows {
		out.rows++
		if err := out.form.Row(&rows[i]); err != nil {
			return err
		}
	}
	return out.end()
}

func newClusterFailuresCommand() *cobra.Command {
	o, output, limit, endpoint, service, each := &clusterAsker{}, newChoice("text", "json"), 0, "", "", false
	cmd := &cobra.Command{
		Use:   "failures",
		Short: "Say which endpoints failed last, who was refused, and why, on each node",
		Long: `Failures sums up what the proxies of all nodes keep of failed attempts, of connections
that an endpoint reset or stopped answering, and of refused clients: as sluice failures,
with rows for each node. PROXY NODE is the node of the proxy, NODE the endpoint's: if
only one proxy node fails, it is the way to the endpoint and not the endpoint.`,
		Example: `  kubectl sluice failures --service shop/cart
  kubectl sluice failures --endpoint 10.244.1.7
  kubectl sluice failures --each -o json | jq -r 'select(.error == "timeout") | .client'`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := between("limit", limit, 1, api.MaxRows); err != nil {
				return err
			}
			if each {
				rows := merge.List[api.Failure]{Compare: merge.Failures, Limit: limit}
				return gatherFailures(o, cmd, endpoint, service, limit, rows.Add, func() error {
					return writeRows(cmd, output.value, rows.Rows, "no failure matches", func(out io.Writer, all []api.Failure) error { return show.Failures(out, all, time.Now()) })
				})
			}
			rows, found := merge.List[blame.Failures]{Compare: blame.Compare, Limit: limit}, 0
			return gatherFailures(o, cmd, endpoint, service, api.MaxRows, func(all []api.Failure) {
				sums := blame.Sum(all)
				rows.Add(sums)
				found += len(sums)
			}, func() error {
				defer more(cmd, found-len(rows.Rows))
				return writeRows(cmd, output.value, rows.Rows, "no failure matches", func(out io.Writer, all []blame.Failures) error { return show.Blame(out, all, time.Now()) })
			})
		},
	}
	o.register(cmd)
	f := cmd.Flags()
	output.register(cmd, "output", "o", "form of the output; json is one object on each line")
	f.StringVar(&endpoint, "endpoint", "", "only this endpoint: an address, or an address and port")
	f.StringVar(&service, "service", "", "only this service, NAMESPACE/NAME, or one port of it, NAMESPACE/NAME:PORT")
	f.BoolVar(&each, "each", false, "list each failure, newest first")
	registerRows(cmd, &limit)
	return cmd
}

// gatherFailures calls take with the last failures of each node, at most limit, newest first.
func gatherFailures(o *clusterAsker, cmd *cobra.Command, endpoint, service string, limit int, take func([]api.Failure), end func() error) error {
	query := url.Values{"endpoint": {endpoint}, "service": {service}, "limit": {strconv.Itoa(limit)}}
	return gather(o, cmd, 0, func(ctx context.Context, c *client.Client) (found api.Failures, err error) {
		return found, c.Get(ctx, api.PathFailures, query, &found)
	}, func(node string, found api.Failures) {
		for i := range found.Failures {
			found.Failures[i].ProxyNode = node
		}
		take(found.Failures)
	}, end)
}

// oneFrame asks for the rates of an interval.
func oneFrame(ctx context.Context, c *client.Client, query url.Values) (frame api.Frame, err error) {
	err = follow(ctx, c, api.PathRates, query, func(_ []byte, f *api.Frame) error {
		frame = *f
		return errEnough
	})
	return frame, err
}

func newClusterSlowCommand() *cobra.Command {
	o, output, watch, limit := &clusterAsker{}, newChoice("text", "json"), time.Duration(0), 0
	cmd := &cobra.Command{
		Use:   "slow [FILTER]",
		Short: "List endpoints that answer later than others of their Service, on each node",
		Long: `Slow watches on all nodes for a time, and lists the endpoints whose first byte comes
later than that of the other endpoints of the same Service port. Each proxy compares
what it saw itself: quantiles of several nodes cannot be merged. An endpoint that is
slow for one PROXY NODE alone has a slow way from there.

` + filterHelp,
		Example: `  kubectl sluice slow
  kubectl sluice slow --for 1m service=shop/cart`,
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := parseFilter(args)
			if err == nil {
				err = between("for", watch, time.Second, time.Hour)
			}
			if err == nil {
				err = between("limit", limit, 1, api.MaxRows)
			}
			if err != nil {
				return err
			}
			query := url.Values{"filter": {text}, "by": {"service,endpoint"}, "sort": {"opened"}, "limit": {strconv.Itoa(api.MaxRows)}, "interval": {watch.String()}}
			rows, compared, found := merge.List[slow.Endpoint]{Compare: slow.Compare, Limit: limit}, 0, 0
			return gather(o, cmd, watch, func(ctx context.Context, c *client.Client) (slow.Found, error) {
				frame, err := oneFrame(ctx, c, query)
				return slow.Find(frame.Rows), err
			}, func(node string, f slow.Found) {
				for i := range f.Slow {
					f.Slow[i].ProxyNode = node
				}
				rows.Add(f.Slow)
				compared, found = compared+f.Compared, found+len(f.Slow)
			}, func() error {
				defer more(cmd, found-len(rows.Rows))
				none := fmt.Sprintf("no endpoint is slow: %d were compared", compared)
				return writeRows(cmd, output.value, rows.Rows, none, show.Slow)
			})
		},
	}
	o.register(cmd)
	cmd.Flags().DurationVar(&watch, "for", 10*time.Second, "how long to watch")
	output.register(cmd, "output", "o", "form of the output; json is one object on each line")
	registerRows(cmd, &limit)
	return cmd
}

func newClusterTopCommand() *cobra.Command {
	o, output, by, sort, interval, limit := &clusterAsker{}, newChoice("text", "json"), newChoice("service", "endpoint", "client", "node"), "", time.Duration(0), 0
	cmd := &cobra.Command{
		Use:   "top [FILTER]",
		Short: "List services, endpoints and clients of all nodes by what they do",
		Long: `Top measures on all nodes for an interval, and lists which services, endpoints, clients
or endpoints' nodes have most connections, bytes or failures. Each node has rows of
its own, as quantiles cannot be merged: PROXY NODE is the node whose proxy measured.

` + filterHelp,
		Example: `  kubectl sluice top
  kubectl sluice top --by endpoint --sort failed
  kubectl sluice top service=shop/cart -o json | jq -s 'map(.opened) | add'`,
		RunE: func(cmd *cobra.Command, args []string) error {
			text, err := parseFilter(args)
			if err == nil {
				err = between("interval", interval, time.Second, time.Hour)
			}
			if err == nil {
				err = between("limit", limit, 1, api.MaxRows)
			}
			order := merge.Rates(sort)
			if err == nil && order == nil {
				err = fmt.Errorf("--sort: %q is not one of %s", sort, strings.Join(live.Ratings(), ", "))
			}
			if err != nil {
				return err
			}
			group := by.value
			if group == "endpoint" {
				group = "service,endpoint"
			}
			query := url.Values{"filter": {text}, "by": {group}, "sort": {sort}, "limit": {strconv.Itoa(limit)}, "interval": {interval.String()}}
			rows, groups := merge.List[api.Rates]{Compare: order, Limit: limit}, 0
			return gather(o, cmd, interval, func(ctx context.Context, c *client.Client) (api.Frame, error) {
				return oneFrame(ctx, c, query)
			}, func(node string, f api.Frame) {
				for i := range f.Rows {
					f.Rows[i].ProxyNode = node
				}
				rows.Add(f.Rows)
				groups += f.Groups
			}, func() error {
				defer more(cmd, groups-len(rows.Rows))
				return writeRows(cmd, output.value, rows.Rows, "no connection matches", func(out io.Writer, all []api.Rates) error {
					_, err := io.WriteString(out, top.Table(&api.Frame{Rows: all}))
					return err
				})
			})
		},
	}
	o.register(cmd)
	f := cmd.Flags()
	by.register(cmd, "by", "", "what a row is")
	f.StringVar(&sort, "sort", "opened", "what rows are sorted by: opened, open, bytes, received, sent, failed, connect, first (the first byte) or name")
	f.DurationVar(&interval, "interval", 2*time.Second, "how long to measure")
	output.register(cmd, "output", "o", "form of the output; json is one row on each line")
	registerRows(cmd, &limit)
	completeValues(cmd, "sort", live.Ratings())
	return cmd
}

func newClusterStatusCommand() *cobra.Command {
	o, output := &clusterAsker{}, newChoice("text", "json")
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Say how the proxies of all nodes do",
		Long: `Status lists the proxies of all nodes, and what is not in force. The exit status is 1
if not all is in force on each node, or a node did not answer.`,
		Example: `  kubectl sluice status
  kubectl sluice status -o json | jq -r 'select(.ready | not) | .node + ": " + .trouble'`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			rows := merge.List[api.Status]{Compare: func(a, b *api.Status) int { return strings.Compare(a.Node, b.Node) }, Limit: api.MaxRows}
			ready := true
			err := gather(o, cmd, 0, func(ctx context.Context, c *client.Client) (s api.Status, err error) {
				return s, c.Get(ctx, api.PathStatus, nil, &s)
			}, func(_ string, s api.Status) {
				rows.Add([]api.Status{s})
				ready = ready && s.Ready
			}, func() error {
				return writeRows(cmd, output.value, rows.Rows, "no node answered", show.Nodes)
			})
			if err == nil && !ready {
				err = errReported
			}
			return err
		},
	}
	o.register(cmd)
	output.register(cmd, "output", "o", "form of the output; json is one object on each line, as of sluice status")
	return cmd
}
