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
	from := choice{value: demo.FromClient, allowed: []string{demo.FromClient, demo.FromNode}}
	cmd := &cobra.Command{
		Use:   "demo [--once] | demo --exec [--from client|node] COMMAND...",
		Short: "Play the proxy to you, without a cluster",
		Long: `Demo runs the real proxy on a small network with client pods, a node and
backend pods, and plays a short story on it: connections are spread over
endpoints, a client stays with its endpoint, a dead endpoint that no client
notices, endpoints that come and go while connections run, a port with no
endpoints. Every step is checked by what clients saw and by the proxy's
connection log.

It all happens in network namespaces of its own; nothing on this machine
changes. It needs no root where user namespaces are allowed.

After the story the proxy goes on until Ctrl-C, and --exec, in another
terminal, runs commands inside that network; their exit status is passed on.

The last line of the story adds up. "connections" are those that clients made,
"answered" those whose clients got their whole answer, "retried" those of them
for which some endpoint had not answered, "failed" the rest. Connects that were
refused because the port has no endpoints made no connection and are not
counted.`,
		Example: `  sluice demo
  sluice demo --once                                # ends after the story; exit status 0 if all held
  sluice demo --exec curl -s http://10.96.0.10/     # while it runs, from a client pod
  sluice demo --exec --from node ip rule            # from the node
  sluice demo --exec bash`,
		DisableFlagsInUseLine: true,
		RunE: func(cmd *cobra.Command, args []string) error {
			switch {
			case execute && len(args) == 0:
				return errors.New("sluice demo --exec: which command? for example: sluice demo --exec curl -s http://10.96.0.10/")
			case execute && o.Once:
				return errors.New("--once and --exec exclude each other: --exec speaks to a demo that goes on")
			case execute:
				return executeInDemo(from.value, args)
			case cmd.Flags().Changed("from"):
				return errors.New("--from belongs to --exec")
			}
			if err := noArguments(cmd, args); err != nil {
				return err
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
	f.BoolVar(&o.Once, "once", false, "end after the story, with exit status 0 if every step held and 1 otherwise")
	f.BoolVar(&execute, "exec", false, "run a command inside the network of the demo that runs in another terminal")
	f.Var(&from, "from", "where --exec runs it: where the client pods are, or on the node")
	f.StringVar(&inside, "inside", "", "play in this process, with files in this directory")
	if err := f.MarkHidden("inside"); err != nil {
		cmd.RunE = func(*cobra.Command, []string) error { return err }
	}
	return cmd
}

// playDemo starts the demo in namespaces of its own; there it calls itself again
// with inside set.
func playDemo(o demo.Options, inside string) error {
	if inside != "" {
		return demo.RunInside(o, inside)
	}
	args := []string{"demo"}
	if o.Once {
		args = append(args, "--once")
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
