package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/sluice-proxy/sluice/cmd/sluice/internal/demo"
)

func newDemoCommand() *cobra.Command {
	var o demo.Options
	var execute bool
	var inside string
	from := newChoice(demo.FromClient, demo.FromNode)
	cmd := &cobra.Command{
		Use:   "demo [--once | --web] | demo --exec [--from client|node] COMMAND...",
		Short: "Show the proxy at work, without a cluster",
		Long: `Demo runs the real proxy on a small network with client pods, a node and
backend pods, and shows its features: it spreads connections over endpoints, a
client stays with its endpoint, no client notices a dead endpoint, endpoints come
and go while connections run, and a port without endpoints refuses. After each
step, demo compares the clients' results with the proxy's connection log.

Demo runs in network namespaces of its own and changes nothing on this machine.
It needs no root where unprivileged user namespaces are allowed.

With --web the page of sluice web shows it all, and after the story the clients go on
asking, so that there is something to see.

After the story the proxy runs until Ctrl-C. Meanwhile --exec, in another terminal,
runs commands in that network, and exits with their status.

The last line counts the connections that clients made: "answered" ones got their
whole answer, "retried" ones among them needed more than one endpoint, "failed"
ones are the rest. It does not count connects that were refused because the port
has no endpoints.`,
		Example: `  sluice demo
  sluice demo --once                                # exits after the story; status 0 if all steps succeeded
  sluice demo --web                                 # and open http://127.0.0.1:8080/
  sluice demo --exec curl -s http://10.96.0.10/     # while it runs, from a client pod
  sluice demo --exec --from node ip rule            # from the node
  sluice demo --exec bash`,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case o.Page != "" && (execute || o.Once):
				return errors.New("--web shows a demo that keeps running: it excludes --once and --exec")
			case execute && len(args) == 0:
				return errors.New("sluice demo --exec: which command? for example: sluice demo --exec curl -s http://10.96.0.10/")
			case execute && o.Once:
				return errors.New("--once and --exec exclude each other: --exec needs a demo that keeps running")
			case execute:
				return executeInDemo(from.value, args)
			case cmd.Flags().Changed("from"):
				return errors.New("--from belongs to --exec")
			}
			if err := noArguments(cmd, args); err != nil {
				return err
			}
			if o.Page != "" {
				address, err := pageAddress("web", o.Page)
				if err != nil {
					return err
				}
				o.Page = address
			}
			o.Command = os.Args[0]
			err := playDemo(o, inside)
			if errors.Is(err, demo.ErrFailed) {
				return errReported
			}
			return err
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.SetInterspersed(false) // the flags of --exec's command are its own
	f.BoolVar(&o.Once, "once", false, "exit after the story: status 0 if every step succeeded, otherwise 1")
	f.StringVar(&o.Page, "web", "", "show the demo as a page, at an address and port of this machine (--web=127.0.0.1:9000)")
	f.Lookup("web").NoOptDefVal = "127.0.0.1:8080"
	f.BoolVar(&execute, "exec", false, "run a command in the network of a demo that runs in another terminal")
	from.register(cmd, "from", "", "where --exec runs the command: in the client pods' namespace, or on the node")
	f.StringVar(&inside, "inside", "", "run in this process, with files in this directory")
	if err := f.MarkHidden("inside"); err != nil {
		cmd.RunE = func(*cobra.Command, []string) error { return err }
	}
	return cmd
}

// playDemo starts the demo in namespaces of its own, where the program calls itself
// again with inside set.
func playDemo(o demo.Options, inside string) error {
	if inside != "" {
		return demo.RunInside(o, inside)
	}
	args := []string{"demo"}
	if o.Once {
		args = append(args, "--once")
	}
	if o.Page != "" {
		args = append(args, "--web="+o.Page)
	}
	return demo.Run(o, append(args, "--inside")...)
}

func executeInDemo(from string, command []string) error {
	status, err := demo.Exec(from, command)
	if err != nil {
		// As a shell does, tell what is wrong and keep the status.
		fmt.Fprintln(os.Stderr, "sluice: "+err.Error())
	}
	if status != 0 {
		return exitCode(status)
	}
	return nil
}
