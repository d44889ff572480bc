package main

import (
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/explain"
)

// storyOptions are the flags of sluice story.
type storyOptions struct {
	asker
	output choice
}

func newStoryCommand() *cobra.Command {
	o := &storyOptions{output: newChoice("text", "json")}
	cmd := &cobra.Command{
		Use:   "story ID",
		Short: "Tell what happened to one connection, and who delays it",
		Long: `Story tells of one connection, which is open, or ended while the proxy still keeps
its record: each attempt, its times and bytes, what TCP says of both sides (round-trip
time, repeated segments, bytes that were not acknowledged, the peer's window), and a
verdict: the client, the client's network, this node, the pod's network, the pod or
nobody, with the reason; and whether the Service, its endpoints or this node have
changed since it began, as sluice explain answers by those of now. sluice conns -o wide
lists the numbers of open connections, sluice log -o json those of connections that ended.

TCP's view is of relayed connections. Of a kernel flow, the kernel knows the time of the
handshake, the bytes that were not acknowledged, and how long ago a packet came.`,
		Example: `  sluice story 4711
  sluice story 4711 -o json | jq .verdict`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              func(cmd *cobra.Command, args []string) error { return o.run(cmd, args[0]) },
	}
	o.register(cmd)
	o.output.register(cmd, "output", "o", "form of the output")
	return cmd
}

func (o *storyOptions) run(cmd *cobra.Command, number string) error {
	id, err := strconv.ParseUint(number, 10, 64)
	if err != nil {
		return fmt.Errorf("%q is not the number of a connection, which sluice conns -o wide lists under ID", number)
	}
	ctx, c, err := o.find(cmd)
	if err != nil {
		return err
	}
	var line json.RawMessage
	if err := c.Get(ctx, strings.Replace(api.PathConnection, "{id}", strconv.FormatUint(id, 10), 1), url.Values{}, &line); err != nil {
		return err
	}
	if o.output.value == "json" {
		_, err := fmt.Fprintln(cmd.OutOrStdout(), string(line))
		return err
	}
	var connection api.Connection
	if err := decode(line, &connection); err != nil {
		return err
	}
	client, _, _ := net.SplitHostPort(connection.Client)
	var now *explain.Answer
	// Not everything is a question: a PROXY header can name a client of the other family.
	if q, err := explain.ParseQuestion(connection.Protocol, client, connection.VIP); err == nil {
		if now, err = askProxy(ctx, c, false)(q); err != nil {
			return err
		}
	}
	return show.Story(cmd.OutOrStdout(), &connection, now)
}
