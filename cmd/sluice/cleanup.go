package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/choose"
)

func newCleanupCommand() *cobra.Command {
	o := newSteeringOptions()
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove what a proxy that was killed left in the kernel",
		Long: `Cleanup removes the tables, routes and rules that a proxy left in this network
namespace when it was killed, however it steered. It touches nothing else, and does nothing
while a proxy runs. The flags are those that the proxy was given.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return cleanUp(cmd, &o) },
	}
	o.registerNames(cmd.Flags())
	return cmd
}

// cleanUp removes what a proxy has left, and prints what that was.
func cleanUp(cmd *cobra.Command, o *steeringOptions) error {
	lock, err := redirect.AcquireLock(o.table)
	if err != nil {
		var locked *redirect.LockedError
		if errors.As(err, &locked) {
			return fmt.Errorf("a proxy is running: %w; stop it, and it cleans up by itself", err)
		}
		return err
	}
	defer func() { _ = lock.Release() }() // the process ends, and the lock with it
	removed, err := choose.Cleanup(o.choose(nil))
	for _, what := range removed {
		fmt.Fprintln(cmd.OutOrStdout(), "removed", what)
	}
	if err == nil && len(removed) == 0 {
		fmt.Fprintln(cmd.OutOrStdout(), "nothing to remove")
	}
	return err
}
