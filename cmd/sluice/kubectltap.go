package main

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/pods"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/client"
)

// clusterTapOptions are the flags of sluice cluster tap.
type clusterTapOptions struct {
	clusterAsker
	tapFlags

	mu    sync.Mutex // for the output
	shown int
}

func newClusterTapCommand() *cobra.Command {
	o := &clusterTapOptions{}
	cmd := &cobra.Command{
		Use:   "tap [FILTER]",
		Short: "Show connections of all nodes as they end",
		Long: `Tap shows the record of each connection and UDP session of all nodes when it ends, until
Ctrl-C, as the nodes send them: those of one node are in order. If its output is read
too slowly, the proxies drop records, and it says how many. A node that does not
answer or ends is named at once, and the others go on. It follows at most --parallel
nodes.

` + filterHelp,
		Example: `  kubectl sluice tap service=shop/cart
  kubectl sluice tap end=endpoint_reset,connect_failed -o json`,
		RunE: func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.clusterAsker.register(cmd)
	o.tapFlags.register(cmd, "lines of the access log in its console form behind the proxy's node, or its JSON form with proxy_node", ", of all nodes together")
	cmd.Flags().IntVar(&o.count, "count", 0, "exit after so many records (default: never)")
	return cmd
}

func (o *clusterTapOptions) run(cmd *cobra.Command, args []string) error {
	text, err := parseFilter(args)
	if err == nil {
		err = o.check()
	}
	if err != nil {
		return err
	}
	ctx, cluster, all, err := o.list(cmd)
	if err != nil {
		return err
	}
	if len(all) > o.parallel {
		return fmt.Errorf("there are %d nodes, and tap follows all at the same time: choose some with --node, or raise --parallel", len(all))
	}
	values := o.query(text, len(all))
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	silent := o.visit(ctx, cluster, all, func(ctx context.Context, pod pods.Pod, c *client.Client) error {
		return follow(ctx, c, api.PathTap, values, func(_ []byte, r *api.Connection) error {
			err := o.write(cmd, pod.Node, r)
			if err != nil {
				end(err) // of all nodes
			}
			return err
		})
	}, func(s unanswered) {
		o.mu.Lock()
		defer o.mu.Unlock()
		cmd.PrintErrln("not followed: " + s.String())
	})
	switch why := context.Cause(ctx); {
	case errors.Is(why, errEnough), errors.Is(why, context.Canceled): // by --count, or Ctrl-C
		return nil
	case why != nil:
		return unlessGone(why)
	case silent > 0:
		return errReported
	}
	return nil
}

// write writes a line of a node's stream. It returns errEnough after --count records.
func (o *clusterTapOptions) write(cmd *cobra.Command, node string, r *api.Connection) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.count > 0 && o.shown == o.count:
		return errEnough
	case r.Lost > 0 && r.Protocol == "":
		cmd.PrintErrf("%s: %d records are not shown\n", printable.Name(node), r.Lost)
		return nil
	}
	r.ProxyNode = node
	var err error
	if o.output.value == "json" {
		err = writeLines(cmd.OutOrStdout(), []api.Connection{*r})
	} else {
		_, err = fmt.Fprintln(cmd.OutOrStdout(), printable.Name(node)+" "+show.Line(r))
	}
	if err != nil {
		return err
	}
	if o.shown++; o.shown == o.count {
		return errEnough
	}
	return nil
}
