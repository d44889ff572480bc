package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/live"
	"github.com/sluice-proxy/sluice/live/api"
)

// connsOptions are the flags of sluice conns.
type connsOptions struct {
	asker
	output choice
	sort   string
	limit  int
}

func newConnsCommand() *cobra.Command {
	o := &connsOptions{output: newChoice("table", "wide", "json", "csv", "tcpdump")}
	cmd := &cobra.Command{
		Use:   "conns [FILTER]",
		Short: "List the open connections",
		Long: `Conns lists the connections and UDP sessions that are open on this node: who
connects to which Service, and which endpoint serves it.

` + filterHelp,
		Example: `  sluice conns
  sluice conns service=shop/cart -o wide
  sluice conns endpoint=10.244.1.7                 # who is connected to this pod
  sluice conns client=10.0.0.0/8 'duration>1h' --sort=-bytes --limit 20
  sluice conns state=connecting -o json | jq .failed_attempts
  tcpdump -n -i any "$(sluice conns client=10.1.2.3 -o tcpdump)"`,
		ValidArgsFunction: o.completeFilter,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args) },
	}
	o.register(cmd)
	f := cmd.Flags()
	o.output.register(cmd, "output", "o", "form of the output; json is one object a line, csv has the fields of json as columns, tcpdump is a filter for its packets")
	f.StringVar(&o.sort, "sort", "", "field to sort by, such as bytes, duration or client; with - before it the largest first (default: as they come)")
	f.IntVar(&o.limit, "limit", 0, fmt.Sprintf("list at most so many (default: all, sorted at most %d)", api.MaxRows))
	completeValues(cmd, "sort", live.Orders())
	return cmd
}

func (o *connsOptions) run(cmd *cobra.Command, args []string) error {
	if err := between("limit", o.limit, 0, api.MaxRows); err != nil {
		return err
	}
	if _, err := live.ParseOrder(o.sort); err != nil {
		return fmt.Errorf("--%w", err)
	}
	ctx, c, text, err := o.findFor(cmd, args)
	if err != nil {
		return err
	}
	values := url.Values{"filter": {text}, "transport": {strconv.FormatBool(o.output.value != "table")}}
	out := newConnsOutput(cmd.OutOrStdout(), cmd.ErrOrStderr(), o.output.value, "no open connection matches")
	if o.sort == "" && o.limit == 0 {
		if err := c.Stream(ctx, api.PathStream, values, out.line); err != nil {
			return unlessGone(err)
		}
		return unlessGone(out.end())
	}
	values.Set("sort", o.sort)
	values.Set("limit", strconv.Itoa(cmp.Or(o.limit, api.MaxRows)))
	var page struct {
		Open, Matched int
		Connections   []json.RawMessage
	}
	if err := c.Get(ctx, api.PathConnections, values, &page); err != nil {
		return pointed(err)
	}
	for _, line := range page.Connections {
		if err := out.line(line); err != nil {
			return unlessGone(err)
		}
	}
	if err := out.end(); err != nil {
		return unlessGone(err)
	}
	if more := page.Matched - len(page.Connections); more > 0 {
		cmd.PrintErrf("and %d more\n", more)
	}
	return nil
}

// connsOutput writes connections in one of the forms.
type connsOutput struct {
	out  io.Writer
	form interface { // nil for JSON
		Row(*api.Connection) error
		Flush() error
	}
	rows int
	none string // is said where there are no rows; "" says nothing
	// messages is where people are told what the output does not say.
	messages io.Writer
}

func newConnsOutput(out, messages io.Writer, form, none string) *connsOutput {
	o := &connsOutput{out: out, messages: messages}
	switch form {
	case "json":
	case "csv":
		o.form = show.NewCSV(out)
	case "tcpdump":
		o.form, o.none = show.NewTcpdump(out), none
	case "text":
		o.form, o.none = show.Lines{Out: out}, none
	default:
		o.form, o.none = show.NewConnections(out, form == "wide"), none
	}
	return o
}

// line writes one connection.
func (o *connsOutput) line(line []byte) error {
	o.rows++
	if o.form == nil {
		_, err := o.out.Write(append(line[:len(line):len(line)], '\n'))
		return err
	}
	var c api.Connection
	if err := decode(line, &c); err != nil {
		return err
	}
	return o.form.Row(&c)
}

// end writes what waits.
func (o *connsOutput) end() error {
	switch {
	case o.form == nil:
		return nil
	case o.rows == 0 && o.none != "":
		_, err := fmt.Fprintln(o.messages, o.none)
		return err
	}
	return o.form.Flush()
}
