package main

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/allnodes"
	"github.com/sluice-proxy/sluice/cmd/sluice/internal/pods"
	"github.com/sluice-proxy/sluice/live/client"
	"github.com/sluice-proxy/sluice/web"
)

// clusterPause is how often the page of all nodes looks for new pods, and asks those that did
// not answer.
const clusterPause = 10 * time.Second

func newClusterWebCommand() *cobra.Command {
	o, listen := &clusterAsker{}, ""
	cmd := &cobra.Command{
		Use:   "web [--listen ADDRESS:PORT]",
		Short: "Show what happens now on all nodes, or on one, as a page in the browser",
		Long: `Web serves the page of sluice web for all nodes together, or for the one that is chosen
on the page, and runs until Ctrl-C. Nodes that do not answer are named there; the numbers
are those of the others. Every 10 s it lists the pods again.

Who can connect to the address sees who connects to what, with your rights: by default
the users of this machine. While the page is open, some ten commands run in each pod.`,
		Example: `  kubectl sluice web
  kubectl sluice web --listen 127.0.0.1:9000 --node node-1,node-2`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error {
			address, err := pageAddress("listen", listen)
			if err != nil {
				return err
			}
			ctx, cluster, all, err := o.list(cmd)
			if err != nil {
				return err
			}
			if len(all) > o.parallel {
				return fmt.Errorf("there are %d nodes, and the page asks all at the same time: choose some with --node, or raise --parallel", len(all))
			}
			f := allnodes.New(o.timeout)
			s, err := web.Listen(address, web.Options{API: f})
			if err != nil {
				return err
			}
			go o.keep(ctx, f, cluster, all)
			cmd.PrintErrf("%d nodes, as a page: %s (Ctrl-C ends it)\n", len(all), s.URL())
			return s.Serve(ctx)
		},
	}
	o.register(cmd)
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:8080", "address and port of the page; a port alone is one of loopback; port 0 takes a free one")
	return cmd
}

// keep has an API know the pods that there are, until ctx ends.
func (o *clusterAsker) keep(ctx context.Context, f *allnodes.API, cluster *pods.Cluster, all []pods.Pod) {
	for {
		var nodes []allnodes.Node
		for _, p := range all[:min(len(all), o.parallel)] {
			nodes = append(nodes, allnodes.Node{Name: p.Node, ID: p.Name, Trouble: p.Trouble, Transport: client.TransportBy(func() (net.Conn, error) { return cluster.Dial(p) })})
		}
		f.Set(ctx, nodes)
		select {
		case <-ctx.Done():
			return
		case <-time.After(clusterPause):
		}
		listing, cancel := context.WithTimeout(ctx, o.timeout)
		if now, err := cluster.List(listing, o.nodes); err == nil { // else those of before
			all = now
		}
		cancel()
	}
}
