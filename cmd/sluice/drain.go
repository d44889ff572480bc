package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/live/api"
)

// drainOptions are the flags of sluice drain.
type drainOptions struct {
	asker
	back bool
}

func newDrainCommand() *cobra.Command {
	o := &drainOptions{}
	cmd := &cobra.Command{
		Use:   "drain [ENDPOINT]",
		Short: "Have new connections avoid an endpoint",
		Long: `Drain has new connections from this node avoid an endpoint, as they avoid one whose
pod is terminating: it serves only if no other endpoint is ready (on this node, where
the traffic policy is Local). Open connections stay; sluice close ends them. --back
takes the endpoint back. A restart of the proxy does not where a BPF file system is
mounted (--bpf-root), in which the drain is kept. Without an endpoint, drain lists those
that are drained, and how many connections they still have.

ENDPOINT is an address, an address and port, or namespace/name of a pod. It is for
the user that the proxy runs as, and for root.`,
		Example: `  sluice drain 10.244.1.7
  sluice drain shop/cart-2
  sluice drain                                     # who is still connected?
  sluice drain shop/cart-2 --back`,
		ValidArgsFunction: o.complete("endpoint", "pod"),
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.register(cmd)
	cmd.Flags().BoolVar(&o.back, "back", false, "take the endpoint back")
	return cmd
}

func (o *drainOptions) run(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) > 1:
		return fmt.Errorf("one endpoint at a time: %q is one too many", args[1])
	case len(args) == 0 && o.back:
		return errors.New("which endpoint? sluice drain lists those that are drained")
	}
	ctx, c, err := o.find(cmd)
	if err != nil {
		return err
	}
	var answer api.Drains
	if len(args) == 0 {
		if err := c.Get(ctx, api.PathDrain, nil, &answer); err != nil {
			return err
		}
		return show.Drains(cmd.OutOrStdout(), answer.Drained)
	}
	if err := c.Act(ctx, api.PathDrain, &api.Drain{Endpoint: args[0], Back: o.back}, &answer); err != nil {
		return err
	}
	switch {
	case answer.Changed > 0:
	case o.back:
		return fmt.Errorf("%s is not drained", args[0])
	default:
		cmd.PrintErrf("%s was drained already\n", args[0])
	}
	return show.Drains(cmd.OutOrStdout(), answer.Drained)
}
