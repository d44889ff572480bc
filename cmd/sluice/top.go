package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"strconv"
	"time"

	tea "github.com/charmbracelet/bubbletea"
	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/top"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/client"
)

// topOptions are the flags of sluice top.
type topOptions struct {
	asker
	by       choice
	sort     string
	interval time.Duration
	frames   int
	output   choice
}

// topRows bounds the rows of a frame.
const topRows = 500

func newTopCommand() *cobra.Command {
	o := &topOptions{
		by:     newChoice("service", "endpoint", "client", "node"),
		output: newChoice("text", "json"),
	}
	cmd := &cobra.Command{
		Use:   "top [FILTER]",
		Short: "Watch services, endpoints and clients by what they do",
		Long: `Top shows live which services, endpoints, clients or nodes have most connections,
bytes or failures, and how long connecting and the first byte take. Keys change the view, the order
and the filter; the last line lists them, and ? explains them and the columns. With --frames, or where the output is no
terminal, it prints frames instead.

` + filterHelp,
		Example: `  sluice top
  sluice top --by endpoint --sort failed
  sluice top service=shop/cart --by client
  sluice top --frames 1 --interval 10s -o json | jq .total`,
		ValidArgsFunction: o.completeFilter,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.register(cmd)
	f := cmd.Flags()
	o.by.register(cmd, "by", "", "what a row is")
	f.StringVar(&o.sort, "sort", "opened", "what rows are sorted by: opened, open, bytes, received, sent, failed, connect, first (the first byte) or name")
	f.DurationVar(&o.interval, "interval", time.Second, "time between two frames")
	f.IntVarP(&o.frames, "frames", "n", 0, "print so many frames, and exit")
	o.output.register(cmd, "output", "o", "form of printed frames; json is one object a line")
	completeValues(cmd, "sort", live.Ratings())
	return cmd
}

func (o *topOptions) run(cmd *cobra.Command, args []string) error {
	if err := between("interval", o.interval, time.Second, time.Hour); err != nil {
		return err
	}
	if o.frames < 0 {
		return fmt.Errorf("--frames: %d is negative", o.frames)
	}
	if err := new(live.Frame).Sort(o.sort); err != nil {
		return fmt.Errorf("--%w", err)
	}
	ctx, c, text, err := o.findFor(cmd, args)
	if err != nil {
		return err
	}
	by := o.by.value
	if by == "endpoint" {
		by = "service,endpoint"
	}
	q := top.Query{By: by, Sort: o.sort, Filter: text}
	if o.frames > 0 || o.output.value == "json" || !isTerminal(os.Stdout) {
		return o.print(ctx, cmd, c, q)
	}
	return o.watch(ctx, c, q)
}

// stream calls visit with each frame of a query.
func (o *topOptions) stream(ctx context.Context, c *client.Client, q top.Query, visit func(line []byte, f *api.Frame) error) error {
	values := url.Values{"filter": {q.Filter}, "by": {q.By}, "sort": {q.Sort}, "limit": {strconv.Itoa(topRows)}, "interval": {o.interval.String()}}
	return follow(ctx, c, api.PathRates, values, visit)
}

// print writes frames to the output.
func (o *topOptions) print(ctx context.Context, cmd *cobra.Command, c *client.Client, q top.Query) error {
	out, printed := cmd.OutOrStdout(), 0
	return unlessGone(o.stream(ctx, c, q, func(line []byte, f *api.Frame) error {
		if o.output.value == "json" {
			if _, err := fmt.Fprintln(out, string(line)); err != nil {
				return err
			}
		} else {
			if _, err := io.WriteString(out, top.Table(f)); err != nil {
				return err
			}
			if more := f.Groups - len(f.Rows); more > 0 {
				cmd.PrintErrf("and %d more\n", more)
			}
		}
		if printed++; printed == o.frames {
			return errEnough
		}
		return nil
	}))
}

// topPause is how long top waits after an error, such as the end of the proxy, before it
// asks again.
const topPause = 2 * time.Second

// keepOn calls stream until ctx ends, with a pause between two calls, and tells its errors.
func keepOn(ctx context.Context, pause time.Duration, stream func() error, tell func(error)) {
	for ctx.Err() == nil {
		if err := stream(); err != nil {
			tell(err)
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
}

// watch shows the view on the terminal until the user leaves it.
func (o *topOptions) watch(ctx context.Context, c *client.Client, q top.Query) error {
	var program *tea.Program
	end := func() {}
	model := top.New(c.Version.Node, q, func(q top.Query, number int) {
		end() // the stream before
		var streaming context.Context
		streaming, end = context.WithCancel(ctx)
		go keepOn(streaming, topPause, func() error {
			return o.stream(streaming, c, q, func(_ []byte, f *api.Frame) error {
				program.Send(top.Frame{Number: number, Frame: f})
				return nil
			})
		}, func(err error) { program.Send(top.Frame{Number: number, Err: err}) })
	})
	program = tea.NewProgram(model, tea.WithAltScreen(), tea.WithContext(ctx))
	_, err := program.Run()
	end()
	if errors.Is(err, tea.ErrProgramKilled) { // by a signal
		return nil
	}
	return err
}
