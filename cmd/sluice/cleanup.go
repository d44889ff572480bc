package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/choose"
	"github.com/sluice-proxy/sluice/redirect/kubeproxy"
)

func newCleanupCommand() *cobra.Command {
	o := newSteeringOptions()
	var kubeProxy bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove the kernel state of a killed proxy",
		Long: `Cleanup removes the tables, routes and rules that a killed proxy left in this
network namespace, in any steering mode. It touches nothing else, and nothing of
a running proxy. Give it the flags that the proxy had.

With --kube-proxy it also removes kube-proxy's state, even while a Sluice proxy
runs: the tables of its nftables mode, the chains of its iptables mode, and the
tracked UDP flows to Services, which would keep their endpoints.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !kubeProxy {
				return cleanUp(cmd, &o)
			}
			removed, err := kubeproxy.Remove(0)
			report(cmd, removed)
			if err != nil {
				return err
			}
			err = cleanUp(cmd, &o)
			var locked *redirect.LockedError
			if errors.As(err, &locked) {
				return nil // what it made is in use
			}
			return err
		},
	}
	o.registerNames(cmd.Flags())
	cmd.Flags().BoolVar(&kubeProxy, "kube-proxy", false, "also remove what kube-proxy left")
	return cmd
}

func report(cmd *cobra.Command, removed []string) {
	for _, what := range removed {
		fmt.Fprintln(cmd.OutOrStdout(), "removed", what)
	}
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
	report(cmd, removed)
	if err == nil && len(removed) == 0 {
		fmt.Fprintln(cmd.OutOrStdout(), "nothing to remove")
	}
	return err
}
