package main

import (
	"net/url"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/slow"
	"github.com/sluice-proxy/sluice/live/api"
)

// slowOptions are the flags of sluice slow.
type slowOptions struct {
	asker
	time   time.Duration
	output choice
}

func newSlowCommand() *cobra.Command {
	o := &slowOptions{output: newChoice("text", "json")}
	cmd := &cobra.Command{
		Use:   "slow [FILTER]",
		Short: "List endpoints that answer later than others of their Service, or not at all",
		Long: `Slow watches for a time, and lists the endpoints whose first byte comes later than that
of the other endpoints of the same Service port: half of them twice as late and 5 ms
later, or one of a hundred four times as late and 20 ms later. LATE says what is late:
"handshake" (the network to the pod, or its listener's full queue), "answer" (the pod's
program), or "no answer" (it takes requests and sends nothing, while others of the
Service answer). Times run from the attempt to connect to the endpoint. Connections whose
first byte comes while slow watches are looked at, and those that wait for it.

` + filterHelp,
		Example: `  sluice slow
  sluice slow --for 1m service=shop/cart
  sluice slow -o json | jq -r '.pod + " " + .late'`,
		ValidArgsFunction: o.completeFilter,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.register(cmd)
	cmd.Flags().DurationVar(&o.time, "for", 10*time.Second, "how long to watch")
	o.output.register(cmd, "output", "o", "form of the output; json is one object on each line")
	return cmd
}

func (o *slowOptions) run(cmd *cobra.Command, args []string) error {
	if err := between("for", o.time, time.Second, time.Hour); err != nil {
		return err
	}
	ctx, c, filter, err := o.findFor(cmd, args)
	if err != nil {
		return err
	}
	query := url.Values{"filter": {filter}, "by": {"service,endpoint"}, "sort": {"opened"}, "limit": {strconv.Itoa(api.MaxRows)}, "interval": {o.time.String()}}
	frame, err := oneFrame(ctx, c, query)
	if err != nil {
		return err
	}
	found := slow.Find(frame.Rows)
	if more := frame.Groups - len(frame.Rows); more > 0 {
		cmd.PrintErrf("%d endpoints with fewer connections were left out: give a filter\n", more)
	}
	if o.output.value == "json" {
		return writeLines(cmd.OutOrStdout(), found.Slow)
	}
	if len(found.Slow) == 0 {
		cmd.PrintErrf("no endpoint is slow: %d were compared, %d have no other endpoint beside them that answered in %s\n", found.Compared, found.Alone, o.time)
	} else if err := show.Slow(cmd.OutOrStdout(), found.Slow); err != nil {
		return err
	}
	if frame.Total.FailedAttempts > 0 {
		cmd.PrintErrf("%.3g attempts a second to connect to an endpoint failed: see sluice failures\n", frame.Total.FailedAttempts)
	}
	return nil
}
