package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
)

// statusOptions are the flags of sluice status.
type statusOptions struct {
	asker
	output    choice
	verbosity int
	duration  time.Duration
}

func newStatusCommand() *cobra.Command {
	o := &statusOptions{output: newChoice("text", "json")}
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Say how the running proxy does",
		Long: `Status says what the proxy of this node serves, how it steers, what is not in force,
and which objects have problems. The exit status is 1 if not all is in force.

With --set-v it sets the verbosity of the proxy's log for a time (--for), which is
for the user that the proxy runs as, and for root.`,
		Example: `  sluice status
  sluice status -o json | jq .steering
  sluice status --set-v 4 --for 10m`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.register(cmd)
	f := cmd.Flags()
	o.output.register(cmd, "output", "o", "form of the output")
	f.IntVar(&o.verbosity, "set-v", -1, "set the verbosity of the proxy's log, from 0 to 10")
	f.DurationVar(&o.duration, "for", 10*time.Minute, "how long --set-v holds")
	return cmd
}

func (o *statusOptions) run(cmd *cobra.Command) error {
	switch set := cmd.Flags().Changed("set-v"); {
	case set:
		if err := between("set-v", o.verbosity, 0, 10); err != nil {
			return err
		}
		if err := between("for", o.duration, time.Second, 24*time.Hour); err != nil {
			return err
		}
	case cmd.Flags().Changed("for"):
		return errors.New("--for is the time of --set-v, which is missing")
	}
	ctx, c, err := o.find(cmd)
	if err != nil {
		return err
	}
	if o.verbosity >= 0 {
		var state api.LogState
		asked := api.Verbosity{V: o.verbosity, Seconds: int(o.duration / time.Second)}
		if err := c.Act(ctx, api.PathVerbosity, &asked, &state); err != nil {
			return err
		}
	}
	var status api.Status
	if err := c.Get(ctx, api.PathStatus, nil, &status); err != nil {
		return err
	}
	if o.output.value == "json" {
		text, err := json.MarshalIndent(&status, "", "  ")
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintln(cmd.OutOrStdout(), string(printable.JSON(text))); err != nil {
			return err
		}
	} else if err := show.Status(cmd.OutOrStdout(), &status); err != nil {
		return err
	}
	if !status.Ready {
		return errReported
	}
	return nil
}
