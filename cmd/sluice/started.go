package main

import (
	"errors"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/redirect"
)

func newStartedCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "started",
		Short: "Say by the exit status whether this container's proxy has its node",
		Long: `Started is the startup probe of a pod that takes over from another one of its node: the
exit status is 1 while the proxy of another container, or none, steers. Both have the
node's network, so that until then /healthz is the other one's.`,
		Args: noArguments,
		RunE: func(*cobra.Command, []string) error {
			if !redirect.SteersHere() {
				return errors.New("no proxy that can be seen from here steers in this network namespace")
			}
			return nil
		},
	}
}
