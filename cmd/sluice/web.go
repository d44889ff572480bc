package main

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/web"
)

// webOptions are the flags of sluice web.
type webOptions struct {
	asker
	listen string
	hosts  []string
}

func newWebCommand() *cobra.Command {
	o := &webOptions{}
	cmd := &cobra.Command{
		Use:   "web [--listen ADDRESS:PORT]",
		Short: "Show what happens now as a page in the browser",
		Long: `Web serves a page that shows the Services of this node, the connections that are
open and those that end, and why each has reached its endpoint. It asks the proxy
of this node through its admin socket, only reads, and runs until Ctrl-C.

Who can connect to the address sees who connects to what. By default these are the
users of this machine; from another one, use ssh -L 8080:localhost:8080.`,
		Example: `  sluice web
  sluice web --listen 127.0.0.1:9000
  sluice web --listen 192.0.2.10:8080 --allowed-hosts node-1.example.com`,
		Args: noArguments,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd) },
	}
	o.register(cmd)
	f := cmd.Flags()
	f.StringVar(&o.listen, "listen", "127.0.0.1:8080", "address and port of the page; a port alone is one of loopback; port 0 takes a free one")
	f.StringSliceVar(&o.hosts, "allowed-hosts", nil, "names of this machine by which browsers may ask, beside localhost and the address itself")
	return cmd
}

func (o *webOptions) run(cmd *cobra.Command) error {
	address, err := pageAddress("listen", o.listen)
	if err != nil {
		return err
	}
	ctx, c, err := o.find(cmd)
	if err != nil {
		return err
	}
	s, err := web.Listen(address, web.Options{API: web.Forward(c.Transport()), Hosts: o.hosts})
	if err != nil {
		return err
	}
	cmd.PrintErrf("Node %s, as a page: %s (Ctrl-C ends it)\n", cmp.Or(c.Version.Node, "of this machine"), s.URL())
	return s.Serve(ctx)
}

// pageAddress checks the address of a page. Without a host it is on loopback.
func pageAddress(flag, text string) (string, error) {
	host, port, err := net.SplitHostPort(text)
	if err != nil {
		host, port = "", text
	}
	if _, err := strconv.ParseUint(port, 10, 16); err != nil {
		return "", fmt.Errorf("--%s: %q is not an address and a port such as 127.0.0.1:8080 or [::1]:8080", flag, text)
	}
	if host = cmp.Or(host, "127.0.0.1"); host == "localhost" {
		host = "127.0.0.1"
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return "", fmt.Errorf("--%s: %q: %w", flag, text, errors.New(host+" is not an IP address"))
	}
	return net.JoinHostPort(host, port), nil
}
