package main

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/sluice-proxy/sluice/flow"
	"github.com/sluice-proxy/sluice/live/socket"
	"github.com/sluice-proxy/sluice/node"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/redirect/choose"
	"github.com/sluice-proxy/sluice/redirect/kubeproxy"
)

func newCleanupCommand() *cobra.Command {
	run := newRunOptions()
	o := &run.steering
	var kubeProxy bool
	cmd := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove the kernel state of a killed proxy",
		Long: `Cleanup removes the tables, routes and rules that a killed proxy left in this
network namespace, in any steering mode. It touches nothing else, and nothing of
a running proxy. Give it the flags that the proxy had: it accepts all flags of
sluice run, and this help lists those that matter.

With --kube-proxy it also removes kube-proxy's state, even while a Sluice proxy
runs: the tables of its nftables mode, the chains of its iptables mode, the
interface of its IPVS mode, and the tracked UDP flows to Services, which would
keep their endpoints. A chain to which another program's chain leads stays, and
the output says so. Only chains of iptables-legacy need the programs of
iptables; without these, and while IPVS has virtual servers for Services, the exit
status is 1.`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !kubeProxy {
				return cleanUp(cmd, o)
			}
			theirs, errTheirs := kubeproxy.Remove(0)
			report(cmd, theirs)
			var kept []string
			if errTheirs == nil {
				kept, errTheirs = kubeproxy.Kept()
			}
			reportKept(cmd, kept)
			ours, err := removeOurs(cmd, o)
			var locked *redirect.LockedError
			if errors.As(err, &locked) {
				err = nil // what it made is in use
			}
			err = errors.Join(errTheirs, err)
			if err == nil && len(theirs)+len(ours)+len(kept) == 0 {
				fmt.Fprintln(cmd.OutOrStdout(), "nothing to remove")
			}
			return err
		},
	}
	names := pflag.NewFlagSet("", pflag.ContinueOnError)
	named := newSteeringOptions()
	named.registerNames(names)
	run.addTo(cmd, func(flag string) bool { return names.Lookup(flag) != nil })
	cmd.Flags().BoolVar(&kubeProxy, "kube-proxy", false, "also remove what kube-proxy left")
	return cmd
}

func report(cmd *cobra.Command, removed []string) {
	for _, what := range removed {
		fmt.Fprintln(cmd.OutOrStdout(), "removed", what)
	}
}

// reportKept prints which of kube-proxy's chains stay, of many the first ones.
func reportKept(cmd *cobra.Command, kept []string) {
	const most = 10
	for _, chain := range kept[:min(len(kept), most)] {
		fmt.Fprintf(cmd.OutOrStdout(), "left %s: another program's chain leads to it, or kube-proxy still runs\n", chain)
	}
	if more := len(kept) - most; more > 0 {
		fmt.Fprintf(cmd.OutOrStdout(), "left %d further chains of kube-proxy\n", more)
	}
}

// cleanUp removes what a proxy has left, and prints what that was.
func cleanUp(cmd *cobra.Command, o *steeringOptions) error {
	removed, err := removeOurs(cmd, o)
	if err == nil && len(removed) == 0 {
		fmt.Fprintln(cmd.OutOrStdout(), "nothing to remove")
	}
	return err
}

func removeOurs(cmd *cobra.Command, o *steeringOptions) (removed []string, err error) {
	lock, err := redirect.AcquireLock(o.table)
	if err != nil {
		var locked *redirect.LockedError
		if errors.As(err, &locked) {
			return nil, fmt.Errorf("a proxy is running: %w; stop it, and it cleans up by itself", err)
		}
		return nil, err
	}
	defer func() { _ = lock.Release() }() // the process ends, and the lock with it
	removed, err = choose.Cleanup(o.choose(nil))
	pinned, errPinned := flow.Cleanup(o.bpfRoot, o.table, 0)
	removed = append(removed, pinned...)
	drained, errDrained := node.CleanupDrains(o.bpfRoot, o.table)
	if drained {
		removed = append(removed, "what sluice drain has kept for a restart")
	}
	file, errFile := socket.Cleanup(o.instance())
	if file != "" {
		removed = append(removed, "admin socket "+file)
	}
	report(cmd, removed)
	return removed, errors.Join(err, errPinned, errDrained, errFile)
}
